"""Choose the engine of a call: the first one of which nothing says that it cannot run the call.

Shapes: N tokens, D features (of the first linear term; D_k of term k), V classes.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from lowtide.core.backend import marked_constant, reason_against_triton
from lowtide.core.cpu_gemm import gemm
from lowtide.core.errors import ArgumentError
from lowtide.core.strides import copies_rows, lies_by_rows, maps_input, maps_weight, place
from lowtide.ops.linear_cross_entropy.definition.head import Options
from lowtide.ops.linear_cross_entropy.planning.call import ENGINES, Call, backend_of
from lowtide.ops.linear_cross_entropy.planning.operands import TILED

# Operand dtypes of exponentials/gemm_triton.py: float16 lacks the range for exp(z), float32 the
# speed.
EXPONENTIAL_DTYPES = (torch.bfloat16,)  # decision 0002
# Most features of a second term in a tiled engine: a tile has room for so many beside its own
# operands.
SECOND_FEATURES = 64  # decision 0015
# Fewest weights for the CPU's bfloat16 GEMMs; with fewer, the host takes longer than the matrix
# units.
FEWEST_WEIGHTS = 1 << 20


class Choice(NamedTuple):
    """Hold the engine of a call, and why none that is preferred to it runs the call."""

    engine: str
    reasons: dict[str, str]


def choose_engine(call: Call) -> Choice:
    """Choose by layouts, dtypes and the device.

    This happens once per call, because each engine saves row statistics of its own.
    """
    backend = choose_backend(call.options.backend, call.head.device, call.options.compute_dtype)
    reasons: dict[str, str] = {}
    for engine, unsupported_reason in UNSUPPORTED_REASONS.items():
        reason = unsupported_reason(call, backend)
        if reason is None:
            break
        reasons[engine] = reason
    return Choice(engine, reasons)


def _against_soft_targets(call: Call, backend: str) -> str | None:
    """Return why 16-bit distances are not exact enough for the call or not fast to load, or None.

    Class probabilities with more digits than the operands may be nearer to p than a distance can
    tell. The slope of a soft cap, and a sum of gradients times logits, need more digits as well.
    Rows whose length is no multiple of 16 would be loaded element by element.
    """
    if call.call_kind.soft_dtype not in EXPONENTIAL_DTYPES:  # decision 0018
        return "it takes class probabilities in bfloat16"
    if call.options.softcap:
        return "it takes no soft cap"
    if call.needs_grad.scale:
        return "it takes no learned scale"
    if call.V % 16 != 0:
        return "it takes classes in a multiple of 16"
    return _against_tiles(call, backend)


def _against_exponentials(call: Call, backend: str) -> str | None:
    reason = _against_tiles(call, backend)
    if reason is None and call.call_kind.probabilities:
        return "it takes class indices"
    if reason is None and call.options.label_smoothing and call.options.softcap:
        # The smoothing term is of rank 1 only as long as no soft cap bends the logits.
        return "it takes label smoothing without a soft cap"
    return reason


def _against_cpu_exponentials(call: Call, backend: str) -> str | None:
    weight, *others = call.head.weights
    options, call_kind = call.options, call.call_kind
    if call.device != "cpu" or backend != "torch":
        return "it is for CPU tensors, without Triton"
    if not weight.dtype == options.compute_dtype == torch.bfloat16:
        return "it takes operands that are bfloat16"
    if not lies_by_rows(weight):
        return "it takes a weight whose features lie side by side"
    refused = {
        "it takes one linear term": others,
        "it computes a loss, and no log-probabilities": call_kind.log_probs,
        "it takes class indices": call_kind.probabilities,
        "it takes no learned scale": call_kind.needs_grad.scale,
        "it takes no soft cap": options.softcap,
        "it takes no label smoothing": options.label_smoothing,
    }
    for reason, applies in refused.items():
        if applies:
            return reason
    if weight.shape[0] * weight.shape[1] < FEWEST_WEIGHTS:
        return f"it is for heads of {FEWEST_WEIGHTS} weights and more"
    return _cpu_products_refuse()


def _against_triton(call: Call, backend: str) -> str | None:
    if backend == "triton":
        return None
    return f"its kernels are Triton's, and this call runs in plain torch, on {call.device} tensors"


def _against_torch(_call: Call, _backend: str) -> str | None:
    return None


# In order of preference.
UNSUPPORTED_REASONS: dict[str, Callable[[Call, str], str | None]] = {
    "soft_targets": _against_soft_targets,
    "exponentials": _against_exponentials,
    "cpu_exponentials": _against_cpu_exponentials,
    "logits_triton": _against_triton,
    "logits_torch": _against_torch,
}


def _against_tiles(call: Call, backend: str) -> str | None:
    """Return why engines that read operands through tensor maps cannot run the call, or None."""
    head = call.head
    reason = _against_triton(call, backend)
    if reason is not None:
        return reason
    if not _has_tensor_maps(head.device):
        return "it needs the tensor maps of a Hopper card"
    dtype = call.options.compute_dtype if call.device == "cuda" else call.options.sum_dtype
    if dtype not in EXPONENTIAL_DTYPES:
        return f"it takes bfloat16, and the products are in {str(dtype).removeprefix('torch.')}"
    if len(head.inputs) > 2 or any(each.shape[-1] > SECOND_FEATURES for each in head.inputs[1:]):
        return f"it takes one linear term, and one of at most {SECOND_FEATURES} features beside it"
    for input, weight in zip(head.inputs, head.weights):
        if input.shape[-1] % 8:
            return f"it takes features in a multiple of 8, and there are {input.shape[-1]}"
        mapped = {
            "input": maps_input(input, copies_rows(input, dtype), place),
            "weight": maps_weight(weight, dtype, place),
        }
        for name, maps in mapped.items():
            if not maps:
                return f"it takes features side by side in rows aligned to 16 bytes, unlike the {name}'s"
    return None


def check_engine(options: Options, device: torch.device) -> None:
    """Refuse a call whose engine was chosen elsewhere, for a saved graph, and cannot run here."""
    engine, reason = options.engine, None
    if engine not in ENGINES:
        raise ArgumentError(
            f"engine must be one of {ENGINES}, got {engine!r}; choose one with planner.with_graph_facts"
        )
    if backend_of(engine) == "triton":
        reason = reason_against_triton(device, options.compute_dtype, "input")
    if engine in TILED and not _has_tensor_maps(device):
        reason = reason or "this device has no tensor maps of a Hopper card"
    if engine == "cpu_exponentials" and device.type != "cpu":
        reason = f"it is for CPU tensors, and input is on {device}"
    if reason is not None:
        raise ArgumentError(
            f"this call was compiled or exported for the engine {engine!r}, which cannot run here: {reason}; "
            "compile or export it here"
        )


def choose_backend(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """Return "triton" or "torch": the backend that was asked for, or the one that "auto" means."""
    reason = reason_against_triton(device, dtype, "input")
    if backend == "auto":
        return "triton" if device.type == "cuda" and reason is None else "torch"
    if backend == "triton" and reason is not None:
        raise ArgumentError(f"backend='triton' cannot run this call: {reason}; use backend='auto' or 'torch'")
    return backend


@marked_constant
def _has_tensor_maps(device: torch.device) -> bool:
    """Return True on a Hopper GPU that is present.

    Later GPUs have tensor maps too, but the tiles were measured on Hopper and fit its shared
    memory. A CUDA tensor without a GPU is a fake one.
    """
    nvidia = device.type == "cuda" and torch.version.hip is None and torch.cuda.is_available()
    return nvidia and torch.cuda.get_device_capability(device)[0] == 9


@marked_constant
def _cpu_products_refuse() -> str | None:
    """Return why the CPU's bfloat16 GEMMs cannot run, or None."""
    return gemm.against()
