"""Which way a call goes: the backend, the dtype of its products, and the paths that its operands fit.

Shapes: N tokens, D features (of the first linear term; D_k of term k), V classes.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lowtide.linear_cross_entropy import cpu_products
from lowtide.linear_cross_entropy.check import ArgumentError, kernels_run_on_the_cpu
from lowtide.linear_cross_entropy.head import Head, Options

# Operands of exponential_kernels.py's tiles: float16 has not the range for exp(z), float32 not the speed.
EXPONENTIAL_DTYPES = (torch.bfloat16,)
# Of a second term there: what a tile has room for beside its own operands.
SECOND_FEATURES = 64
# Of a CPU's bfloat16 products: with fewer, the host has more to do than its units.
FEWEST_WEIGHTS = 1 << 20


class Wanted(NamedTuple):
    """Which gradients are; in the order of Head's tensors."""

    inputs: tuple[bool, ...]
    weights: tuple[bool, ...]
    bias: bool
    scale: bool

    @property
    def some(self) -> bool:
        return any((*self.inputs, *self.weights, self.bias, self.scale))


class Job(NamedTuple):
    """What a call makes of a head."""

    wanted: Wanted
    log_probs: bool
    """Log-probabilities and entropies, or their gradients; else a loss."""
    soft_dtype: torch.dtype | None
    """Of class probabilities, if the target holds these."""
    class_weights: bool

    @property
    def probabilities(self) -> bool:
        return self.soft_dtype is not None


class Route(NamedTuple):
    """Of one call; plan.py's Plan says what each means."""

    backend: str
    distances: bool
    against_exponentials: str | None
    against_cpu_exponentials: str | None
    compute_dtype: torch.dtype
    copies_rows: tuple[bool, ...]

    @property
    def exponentials(self) -> bool:
        return self.against_exponentials is None

    @property
    def cpu_exponentials(self) -> bool:
        return self.against_cpu_exponentials is None


def find_route(head: Head, options: Options, job: Job, *, aligned: bool = False) -> Route:
    cuda = head.device.type == "cuda"
    backend = choose_backend(options.backend, head.device, options.compute_dtype)
    against_cpu_exponentials = _reason_against_cpu_exponentials(head, options, job, backend)
    # torch has no half-precision product with a float32 result on the CPU.
    own = against_cpu_exponentials is None
    compute_dtype = options.compute_dtype if cuda or own else options.sum_dtype
    # Rows that are ignored are left out on the CPU, so that a chunk is a copy of those that count.
    selects = not cuda and backend == "torch"
    copies_rows = tuple(
        selects or each.dtype != compute_dtype or not _multiplies(each) for each in head.inputs
    )
    against_tiles = _reason_against_tiles(head, backend, compute_dtype, copies_rows, aligned)
    return Route(
        backend=backend,
        distances=against_tiles is None and _fits_distances(head, options, job),
        against_exponentials=against_tiles or _reason_against_exponentials(options, job),
        against_cpu_exponentials=against_cpu_exponentials,
        compute_dtype=compute_dtype,
        copies_rows=copies_rows,
    )


def _reason_against_tiles(
    head: Head,
    backend: str,
    dtype: torch.dtype,
    copies_rows: tuple[bool, ...],
    aligned: bool,
) -> str | None:
    if backend != "triton":
        return f"its kernels are Triton's, and this call runs in plain torch, on {head.device.type} tensors"
    if not _has_tensor_maps(head.device):
        return "it needs the tensor maps of a Hopper card"
    if dtype not in EXPONENTIAL_DTYPES:
        return f"it takes bfloat16, and the products are in {str(dtype).removeprefix('torch.')}"
    if len(head.inputs) > 2 or any(each.shape[-1] > SECOND_FEATURES for each in head.inputs[1:]):
        return f"it takes one linear term, and one of at most {SECOND_FEATURES} features beside it"
    if not all(
        _maps(input, weight, copies, dtype, anywhere=aligned)
        for input, weight, copies in zip(head.inputs, head.weights, copies_rows)
    ):
        return "it takes features that are a multiple of 8 and lie side by side, aligned to 16 bytes"
    return None


def _fits_distances(head: Head, options: Options, job: Job) -> bool:
    """Probabilities of more digits than the operands may be nearer to p than a distance says. A slope, and a
    sum of gradients times logits, want more of them, too. Rows of other lengths are loaded one by one."""
    as_coarse = job.soft_dtype in EXPONENTIAL_DTYPES
    return as_coarse and not options.softcap and not job.wanted.scale and head.classes % 16 == 0


def _reason_against_exponentials(options: Options, job: Job) -> str | None:
    if job.probabilities:
        return "it takes class indices"
    if options.label_smoothing and options.softcap:
        # A spread over all classes is a term of rank 1 only as long as nothing bends the logits.
        return "it takes label smoothing without a soft cap"
    return None


def _reason_against_cpu_exponentials(head: Head, options: Options, job: Job, backend: str) -> str | None:
    weight, *others = head.weights
    (V, D), (outer, inner) = weight.shape, weight.stride()
    if head.device.type != "cpu" or backend != "torch":
        return "it is for CPU tensors, without Triton"
    if not weight.dtype == options.compute_dtype == torch.bfloat16:
        return "it takes operands that are bfloat16"
    if inner != 1 or outer < D:
        return "it takes a weight whose features lie side by side"
    if others or job.log_probs or job.probabilities or job.wanted.scale:
        return "it takes one linear term, class indices and no learned scale, for a loss"
    if options.softcap or options.label_smoothing:
        return "it takes neither a soft cap nor label smoothing"
    if V * D < FEWEST_WEIGHTS:
        return f"it is for heads of {FEWEST_WEIGHTS} weights and more"
    if not options.own_products:
        return cpu_products.against() or "this graph was made where there are no such products"
    return None


def choose_backend(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    reason = _triton_refuses(device, dtype)
    if backend == "auto":
        return "triton" if device.type == "cuda" and reason is None else "torch"
    if backend == "triton" and reason is not None:
        raise ArgumentError(f"backend='triton' cannot run this call: {reason}; use backend='auto' or 'torch'")
    return backend


def _triton_refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    try:
        import triton  # noqa: F401
    except ModuleNotFoundError:
        return "triton is not installed"
    if device.type != "cuda" and not kernels_run_on_the_cpu():
        return f"its kernels run on CUDA tensors, and input is on {device}"
    if dtype == torch.float64:
        return "its kernels sum in float32, and input is float64"
    return None


def _has_tensor_maps(device: torch.device) -> bool:
    """Hopper: later cards have them too, but the tiles were measured, and fit its shared memory, there.
    (Without a card a CUDA tensor is a fake one.)"""
    nvidia = device.type == "cuda" and torch.version.hip is None and torch.cuda.is_available()
    return nvidia and torch.cuda.get_device_capability(device)[0] == 9


def _maps(input: Tensor, weight_VD: Tensor, copies_rows: bool, dtype: torch.dtype, *, anywhere: bool) -> bool:
    """Whether both can be read through tensor maps: rows of features, 16 bytes to the unit; `anywhere`: if
    they began at such a place."""

    def aligned(tensor: Tensor) -> bool:
        begins = 0 if anywhere else tensor.storage_offset()
        return all(stride % 8 == 0 for stride in (*tensor.stride()[:-1], begins))

    rows = input.dim() <= 3 or _flattens(input)
    inner = input.stride(-1) == weight_VD.stride(-1) == 1 and input.shape[-1] % 8 == 0
    # A copy is aligned by itself.
    return (
        rows
        and inner
        and (copies_rows or aligned(input))
        and (weight_VD.dtype != dtype or aligned(weight_VD))
    )


def _flattens(input: Tensor) -> bool:
    """Whether [..., D] can be seen as [N, D] without a copy."""
    size, stride = input.shape[:-1], input.stride()[:-1]
    return all(
        size[i] == 1 or size[i + 1] == 1 or stride[i] == size[i + 1] * stride[i + 1]
        for i in range(len(size) - 1)
    )


def _multiplies(input: Tensor) -> bool:
    """Whether [..., D] can be seen as an [N, D] that a product reads as it is: by rows, or by columns."""
    if not _flattens(input):
        return False
    flat_ND = input.view(math.prod(input.shape[:-1]), input.shape[-1])
    (N, D), (outer, inner) = flat_ND.shape, flat_ND.stride()
    return (inner == 1 and outer >= D) or (outer == 1 and inner >= N)
