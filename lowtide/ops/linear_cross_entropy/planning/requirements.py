"""Choose the engine of a call by what each requires of operands, options and device.

Shapes: N tokens, D features (of the first linear term; D_k of term k), V classes.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lowtide.core.backend import kernels_run_on_the_cpu
from lowtide.core.cpu_gemm import gemm
from lowtide.core.errors import ArgumentError
from lowtide.core.strides import (
    address,
    copies_rows,
    lies_by_rows,
    maps_input,
    maps_weight,
    place,
)
from lowtide.ops.linear_cross_entropy.definition.head import Head, Options

# In this order: engines/engine.py with softmax_torch.py; the same with softmax_triton.py;
# exponentials/engine.py; soft_targets/engine.py; exponentials/cpu_engine.py. Each saves row
# statistics of its own: those of "exponentials" and "cpu_exponentials" exclude the target from a
# row's sum.
ENGINES = ("torch", "triton", "exponentials", "distances", "cpu_exponentials")
TILED = ("exponentials", "distances")  # engines that read operands through tensor maps
# Operand dtypes of exponentials/gemm_triton.py: float16 lacks the range for exp(z), float32 the
# speed.
EXPONENTIAL_DTYPES = (torch.bfloat16,)  # decision 0002
# Most features of a second term in a tiled engine: a tile has room for so many beside its own
# operands.
SECOND_FEATURES = 64  # decision 0015
# Fewest weights for the CPU's bfloat16 GEMMs; with fewer, the host takes longer than the matrix
# units.
FEWEST_WEIGHTS = 1 << 20


class Wanted(NamedTuple):
    """Say which gradients are wanted, in the order of Head's tensors."""

    inputs: tuple[bool, ...]
    weights: tuple[bool, ...]
    bias: bool
    scale: bool

    @property
    def all(self) -> tuple[bool, ...]:
        return (*self.inputs, *self.weights, self.bias, self.scale)

    @property
    def some(self) -> bool:
        return any(self.all)


class Job(NamedTuple):
    """Say what a call computes from a head: which gradients, which outputs, from which target."""

    wanted: Wanted
    log_probs: bool
    """True for log-probabilities and entropies, or their gradients; False for a loss."""
    soft_dtype: torch.dtype | None
    """Dtype of the class probabilities, if the target holds them; else None."""
    class_weights: bool
    """True if the call has class weights."""

    @property
    def probabilities(self) -> bool:
        return self.soft_dtype is not None


class Choice(NamedTuple):
    """Hold the engine of a call, and the reasons against the other engines."""

    engine: str
    against_exponentials: str | None
    against_cpu_exponentials: str | None


def choose_engine(head: Head, options: Options, job: Job) -> Choice:
    """Choose by layouts, dtypes and the device.

    This happens once per call, because each engine saves row statistics of its own.
    """
    backend = choose_backend(options.backend, head.device, options.compute_dtype)
    against_cpu_exponentials = _reason_against_cpu_exponentials(head, options, job, backend)
    against_tiles = _reason_against_tiles(head, options, backend)
    against_exponentials = against_tiles or _reason_against_exponentials(options, job)
    if against_tiles is None and _fits_distances(head, options, job):
        engine = "distances"
    elif against_exponentials is None:
        engine = "exponentials"
    else:
        engine = backend if against_cpu_exponentials else "cpu_exponentials"
    return Choice(engine, against_exponentials, against_cpu_exponentials)


class Route(NamedTuple):
    """Hold what follows from engine and layout; planner.py's Plan explains the fields."""

    engine: str
    compute_dtype: torch.dtype
    copies_rows: tuple[bool, ...]

    @property
    def backend(self) -> str:
        return backend_of(self.engine)

    @property
    def distances(self) -> bool:
        return self.engine == "distances"

    @property
    def exponentials(self) -> bool:
        return self.engine == "exponentials"

    @property
    def cpu_exponentials(self) -> bool:
        return self.engine == "cpu_exponentials"


def route_of(head: Head, options: Options) -> Route:
    """Return what follows from the engine of the options and the layout of the operands."""
    cuda = head.device.type == "cuda"
    # On the CPU torch has no half-precision GEMM with a float32 result.
    own = options.engine == "cpu_exponentials"
    compute_dtype = options.compute_dtype if cuda or own else options.sum_dtype
    # On the CPU ignored rows are left out (decision 0008): a chunk copies the rows that are kept.
    selects = not cuda and backend_of(options.engine) == "torch"
    copied = tuple(selects or copies_rows(each, compute_dtype) for each in head.inputs)
    return Route(options.engine, compute_dtype, copied)


def backend_of(engine: str) -> str:
    """Return "triton" if the engine's kernels are Triton's, else "torch"."""
    return "torch" if engine in ("torch", "cpu_exponentials") else "triton"


def check_engine(options: Options, device: torch.device) -> None:
    """Refuse a call whose engine was chosen elsewhere, for a saved graph, and cannot run here."""
    engine, reason = options.engine, None
    if engine not in ENGINES:
        raise ArgumentError(f"engine must be one of {ENGINES}, got {engine!r}; choose one with planner.told")
    if backend_of(engine) == "triton":
        reason = _triton_refuses(device, options.compute_dtype)
    if engine in TILED and not _has_tensor_maps(device):
        reason = reason or "this device has no tensor maps of a Hopper card"
    if engine == "cpu_exponentials" and device.type != "cpu":
        reason = f"it is for CPU tensors, and input is on {device}"
    if reason is not None:
        raise ArgumentError(
            f"this call was compiled or exported for the engine {engine!r}, which cannot run here: {reason}; "
            "compile or export it here"
        )


def readable(head: Head, options: Options) -> Head:
    """Copy each operand that the engine cannot read in its layout.

    There is none if the engine was chosen for these tensors. But a compiled graph may get tensors
    that begin at other addresses than the example's, and hooks may return saved tensors in another
    layout.
    """
    if options.engine in TILED:
        route = route_of(head, options)
        inputs = tuple(
            each if maps_input(each, copies, address) else _copied(each)
            for each, copies in zip(head.inputs, route.copies_rows)
        )
        weights = tuple(
            each if maps_weight(each, route.compute_dtype, address) else _copied(each)
            for each in head.weights
        )
        return head._replace(inputs=inputs, weights=weights)
    if options.engine == "cpu_exponentials" and not lies_by_rows(head.weights[0]):
        return head._replace(weights=(_copied(head.weights[0]),))
    return head


def _copied(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _reason_against_tiles(head: Head, options: Options, backend: str) -> str | None:
    """Return why the tiled engines cannot run the call, or None."""
    if backend != "triton":
        return f"its kernels are Triton's, and this call runs in plain torch, on {head.device.type} tensors"
    if not _has_tensor_maps(head.device):
        return "it needs the tensor maps of a Hopper card"
    dtype = options.compute_dtype if head.device.type == "cuda" else options.sum_dtype
    if dtype not in EXPONENTIAL_DTYPES:
        return f"it takes bfloat16, and the products are in {str(dtype).removeprefix('torch.')}"
    if len(head.inputs) > 2 or any(each.shape[-1] > SECOND_FEATURES for each in head.inputs[1:]):
        return f"it takes one linear term, and one of at most {SECOND_FEATURES} features beside it"
    if not all(
        input.shape[-1] % 8 == 0
        and maps_input(input, copies_rows(input, dtype), place)
        and maps_weight(weight, dtype, place)
        for input, weight in zip(head.inputs, head.weights)
    ):
        return "it takes features that are a multiple of 8 and lie side by side, aligned to 16 bytes"
    return None


def _fits_distances(head: Head, options: Options, job: Job) -> bool:
    """Return True if 16-bit distances are exact enough for the call and fast to load.

    Class probabilities with more digits than the operands may be nearer to p than a distance can
    tell. The slope of a soft cap, and a sum of gradients times logits, need more digits as well.
    Rows whose length is no multiple of 16 would be loaded element by element.
    """
    as_coarse = job.soft_dtype in EXPONENTIAL_DTYPES  # decision 0018
    return as_coarse and not options.softcap and not job.wanted.scale and head.classes % 16 == 0


def _reason_against_exponentials(options: Options, job: Job) -> str | None:
    """Return why the exponentials engine cannot run the call, or None."""
    if job.probabilities:
        return "it takes class indices"
    if options.label_smoothing and options.softcap:
        # The smoothing term is of rank 1 only as long as no soft cap bends the logits.
        return "it takes label smoothing without a soft cap"
    return None


def _reason_against_cpu_exponentials(head: Head, options: Options, job: Job, backend: str) -> str | None:
    """Return why exponentials/cpu_engine.py cannot run the call, or None."""
    weight, *others = head.weights
    if head.device.type != "cpu" or backend != "torch":
        return "it is for CPU tensors, without Triton"
    if not weight.dtype == options.compute_dtype == torch.bfloat16:
        return "it takes operands that are bfloat16"
    if not lies_by_rows(weight):
        return "it takes a weight whose features lie side by side"
    if others or job.log_probs or job.probabilities or job.wanted.scale:
        return "it takes one linear term, class indices and no learned scale, for a loss"
    if options.softcap or options.label_smoothing:
        return "it takes neither a soft cap nor label smoothing"
    if weight.shape[0] * weight.shape[1] < FEWEST_WEIGHTS:
        return f"it is for heads of {FEWEST_WEIGHTS} weights and more"
    return _cpu_products_refuse()


def choose_backend(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """Return "triton" or "torch": the backend that was asked for, or the one that "auto" means."""
    reason = _triton_refuses(device, dtype)
    if backend == "auto":
        return "triton" if device.type == "cuda" and reason is None else "torch"
    if backend == "triton" and reason is not None:
        raise ArgumentError(f"backend='triton' cannot run this call: {reason}; use backend='auto' or 'torch'")
    return backend


def _triton_refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why Triton's kernels cannot run on the device in this dtype, or None."""
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
    """Return True on a Hopper GPU that is present.

    Later GPUs have tensor maps too, but the tiles were measured on Hopper and fit its shared
    memory. A CUDA tensor without a GPU is a fake one.
    """
    nvidia = device.type == "cuda" and torch.version.hip is None and torch.cuda.is_available()
    return nvidia and torch.cuda.get_device_capability(device)[0] == 9


def _cpu_products_refuse() -> str | None:
    """Return why the CPU's bfloat16 GEMMs cannot run, or None."""
    return gemm.against()


# What depends on machine and process alone is a constant in a compiled graph and is not traced.
# torch.compiler.assume_constant_result sets the same attribute, but imports all of torch.compile.
for _constant in (_triton_refuses, _has_tensor_maps, _cpu_products_refuse):
    _constant.__dict__["_dynamo_marked_constant"] = True
