"""Decide once: all that follows from shapes, dtypes and the device, and never from the values of tensors.

Shapes: N tokens, D features (of the first linear term; D_k of term k), V classes.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lowtide.linear_cross_entropy.check import ArgumentError
from lowtide.linear_cross_entropy.head import Head, Options
from lowtide.linear_cross_entropy.workspace import (
    TARGETS,
    Needs,
    WeightGradient,
    allowed,
    spend,
    spent,
    weight_gradient,
)

# Operands of the path in exponentials.py: float16 has not the range for exp(z), float32 not the speed.
EXPONENTIAL_DTYPES = (torch.bfloat16,)
# Of a second term on that path: what a tile has room for beside its own operands.
SECOND_FEATURES = 64
# One product for all tokens forms the rows of their targets again: for so many classes a token it pays.
CLASSES_PER_TOKEN = 16


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
    probabilities: bool
    """Whether the target holds class probabilities."""
    class_weights: bool


@dataclass(frozen=True, slots=True)
class Plan:
    options: Options
    job: Job
    backend: str
    against_exponentials: str | None
    """Why not the path of exponentials.py but that of streamed.py, which takes any call; None if it is the
    former."""
    workspace: int
    """Bytes that the call may hold beside inputs, outputs and gradients."""
    compute_dtype: torch.dtype
    """Operands of the products: that of the options, but float32 for half precision on the CPU."""
    copies_rows: tuple[bool, ...]
    """Of each term, whether a chunk of the input must be copied, for its dtype or its strides."""
    rows: int
    """Tokens per chunk."""
    operand_classes: int
    """Classes whose weight rows are copied at a time; V where no copy is needed."""
    weight_gradient: WeightGradient
    """Of the first term; the others' are accumulated."""
    block_rows: int
    """Tokens per tile of a class block ("by_class")."""
    block_classes: int
    """Classes per block ("by_class")."""

    @property
    def wanted(self) -> Wanted:
        return self.job.wanted

    @property
    def exponentials(self) -> bool:
        return self.against_exponentials is None

    @property
    def sum_dtype(self) -> torch.dtype:
        """Of logits, statistics and accumulators: float32, or float64 for float64."""
        return self.options.sum_dtype


def make_plan(head: Head, options: Options, job: Job) -> Plan:
    route = _route(head, options, job)
    workspace, needs = _needs(head, options, job, route)
    sizes = spend(workspace, needs, _weight_gradient(head, options, job))
    return Plan(
        options=options,
        job=job,
        backend=route.backend,
        against_exponentials=route.against_exponentials,
        workspace=workspace,
        compute_dtype=route.compute_dtype,
        copies_rows=route.copies_rows,
        rows=sizes.rows,
        operand_classes=sizes.operand_classes,
        weight_gradient=sizes.weight_gradient,
        block_rows=sizes.block_rows,
        block_classes=sizes.block_classes,
    )


def few_tokens(head: Head) -> bool:
    """Whether one product for all tokens may be a weight's gradient. Not in a compiled or an exported graph,
    where N may be a symbol (Dynamo shows it as an int): two graphs would take the place of one of any length,
    and an export would be refused."""
    if torch.compiler.is_compiling() or not isinstance(head.tokens, int):
        return False
    return head.tokens * CLASSES_PER_TOKEN <= head.classes


def keeps_sum(head: Head, options: Options, job: Job) -> bool:
    """Whether the first weight's gradient is kept as a sum until backward: all that the shapes and dtypes of
    the outputs depend on, and as little as possible of N, which may be symbolic."""
    return _weight_gradient(head, options, job) == "accumulate"


def held(head: Head, options: Options, job: Job) -> int:
    """Bytes that a call takes beside what it is given and returns: of the workspace, and under autocast on
    CUDA for its copies of the weights."""
    route = _route(head, options, job)
    workspace, needs = _needs(head, options, job, route)
    cast = [each for each in head.weights if each.is_cuda and each.dtype != route.compute_dtype]
    copies = sum(each.numel() * route.compute_dtype.itemsize for each in cast)
    return copies + spent(needs, spend(workspace, needs, _weight_gradient(head, options, job)))


def _weight_gradient(head: Head, options: Options, job: Job) -> WeightGradient:
    """Decided by shapes, strides and dtypes, which a compiled graph guards, and not by where in its memory a
    tensor begins, which it does not."""
    route = _route(head, options, job, aligned=True)
    return weight_gradient(*_needs(head, options, job, route))


class _Route(NamedTuple):
    backend: str
    against_exponentials: str | None
    compute_dtype: torch.dtype
    copies_rows: tuple[bool, ...]

    @property
    def exponentials(self) -> bool:
        return self.against_exponentials is None


def _route(head: Head, options: Options, job: Job, *, aligned: bool = False) -> _Route:
    # torch has no half-precision product with a float32 result on the CPU.
    cuda = head.device.type == "cuda"
    compute_dtype = options.compute_dtype if cuda else options.sum_dtype
    backend = choose_backend(options.backend, head.device, compute_dtype)
    # Rows that are ignored are left out on the CPU, so that a chunk is a copy of those that count.
    selects = not cuda and backend == "torch"
    copies_rows = tuple(
        selects or each.dtype != compute_dtype or not _multiplies(each) for each in head.inputs
    )
    against = _reason_against_exponentials(head, options, job, backend, compute_dtype, copies_rows, aligned)
    return _Route(backend, against, compute_dtype, copies_rows)


def _reason_against_exponentials(
    head: Head,
    options: Options,
    job: Job,
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
    if job.probabilities:
        return "it takes class indices"
    if options.label_smoothing and options.softcap:
        # A spread over all classes is a term of rank 1 only as long as nothing bends the logits.
        return "it takes label smoothing without a soft cap"
    if not all(
        _maps(input, weight, copies, dtype, anywhere=aligned)
        for input, weight, copies in zip(head.inputs, head.weights, copies_rows)
    ):
        return "it takes features that are a multiple of 8 and lie side by side, aligned to 16 bytes"
    return None


def _needs(head: Head, options: Options, job: Job, route: _Route) -> tuple[int, Needs]:
    """The workspace, and what takes how much of it."""
    wanted, sum_dtype, device = job.wanted, options.sum_dtype, head.device.type
    N, V, D = head.tokens, head.classes, head.inputs[0].shape[-1]
    features = [input.shape[-1] for input in head.inputs]
    sum_size, operand_size = sum_dtype.itemsize, route.compute_dtype.itemsize
    # On CUDA another dtype means autocast, and one copy of the whole weight: not the workspace's.
    weight = head.weights[0]
    copies_weight = (weight.dtype != route.compute_dtype and device == "cpu") or 1 not in weight.stride()

    rounds_apart = (
        route.backend == "torch" and route.compute_dtype != sum_dtype
    )  # only a kernel rounds in place
    logit = sum_size + (operand_size if rounds_apart else 0)
    if route.exponentials:  # a bfloat16 number, and float32 sums for every 128 classes
        logits = V // 32 * _sums(options, job) + ((V + 8) * operand_size if wanted.some else 0)
    else:
        logits = V * (logit if wanted.some else sum_size)
        if route.backend == "torch":
            logits += V * sum_size * _copies(options, job)
    row = logits + 24 * sum_size  # and statistics
    for k, D_k in enumerate(features):
        row += (route.copies_rows[k] * operand_size + wanted.inputs[k] * sum_size) * D_k
        if route.exponentials:
            row += (wanted.weights[k] + wanted.bias) * D_k * operand_size
            row += wanted.scale * D_k * sum_size
    # The bias, its gradient, and a chunk's share of that.
    vectors = (
        ((11 if route.exponentials else 3) * int(head.bias is not None) + int(job.class_weights))
        * V
        * sum_size
    )
    # A CUDA allocation is a multiple of 512 bytes, and some eighty vectors and numbers are small.
    fixed = (
        ((160 if route.exponentials else 64) + 16 * sum_size) * N
        + vectors
        + (65536 if device == "cuda" else 8192)
    )
    weight_sum = 0
    for k, (weight, grad) in enumerate(zip(head.weights, wanted.weights)):
        size = V * features[k] * sum_size if grad and weight.dtype != sum_dtype else 0
        if k == 0:
            weight_sum = size
        else:  # small, and summed in any case
            fixed += size + (V * features[k] * operand_size if weight.dtype != route.compute_dtype else 0)
    # What a sum in the gradient's memory takes beside it: a byte for each weight on the path without a pass
    # (sum_kernels.py), else, on the CPU, half of itself (shared_sum.py).
    split_sum = at_once = 0
    if route.exponentials and head.weights[0].dtype == torch.bfloat16:
        split_sum = min(weight_sum, V * D)
        # Not with label smoothing, which adds to every row.
        if options.few_tokens and not options.label_smoothing:
            at_once = TARGETS * (N * operand_size + D * sum_size)
    elif device == "cpu" and head.weights[0].dtype.itemsize * 2 == sum_size:
        split_sum = min(weight_sum, (V - V // 2) * D * sum_size)
    return allowed(options.workspace, device, weight_sum), Needs(
        N=N,
        D=D,
        V=V,
        device=device,
        fixed=fixed,
        row=row,
        weight_sum=weight_sum,
        split_sum=split_sum,
        at_once=at_once,
        weight_copy=D * operand_size if copies_weight else 0,
        class_sum=D * sum_size,
        block_logit=logit + (sum_size * _copies(options, job) if route.backend == "torch" else 0),
        block_row=2 * sum(features) * operand_size,
    )


def _copies(options: Options, job: Job) -> int:
    """Tensors as large as the logits that the pass in torch makes beside them."""
    several = (bool(options.softcap), job.log_probs, job.probabilities, job.wanted.scale)
    return 2 * sum(several)


def _sums(options: Options, job: Job) -> int:
    """What the exponential path adds up for each tile of logits."""
    return 1 + 3 * int(job.log_probs) + int(job.wanted.scale)


def choose_backend(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    reason = _triton_refuses(device, dtype)
    if backend == "auto":
        return "triton" if device.type == "cuda" and reason is None else "torch"
    if backend == "triton" and reason is not None:
        raise ArgumentError(f"backend='triton' cannot run this call: {reason}; use backend='auto' or 'torch'")
    return backend


def _triton_refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    try:
        import triton
    except ModuleNotFoundError:
        return "triton is not installed"
    if device.type != "cuda" and not triton.knobs.runtime.interpret:
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
