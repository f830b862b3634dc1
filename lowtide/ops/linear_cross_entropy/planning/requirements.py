"""Tell which backend a call can run on, and whether engines with tensor maps can run it.

spec.py in each engine's folder has the engine's own requirements; operator/planner.py chooses the
engine.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from lowtide.core.bfloat16_units import gemm
from lowtide.core.errors import ArgumentError
from lowtide.core.kernels.backend import has_warpgroup_mma, marked_constant, reason_against_triton
from lowtide.core.strides import copies_rows, maps_input, maps_weight, place
from lowtide.ops.linear_cross_entropy.definition.head import Options, VocabShard
from lowtide.ops.linear_cross_entropy.planning.call import CPU_UNITS, ENGINES, Call, backend_of
from lowtide.ops.linear_cross_entropy.planning.operands import TILED

# Fewest elements of the weight in engines that use a CPU's bfloat16 units. With fewer, the GEMMs
# take less time than the Python code around them, which is about the same in all engines.
FEWEST_WEIGHTS = 1 << 16  # decision 0083
OF_SHARDED = 16  # times as many for the part of a rank; smaller parts were not measured

# Operand dtypes of exponentials/gemm/gemm_triton.py. float16 lacks the range for exp(z), and
# float32 GEMMs are too slow.
EXPONENTIAL_DTYPES = (torch.bfloat16,)  # decision 0002
# The most features of a second linear term in engines with tensor maps. Shared memory has room for
# so many beside the operands of the first term.
SECOND_FEATURES = 64  # decision 0015


def triton_unsupported_reason(call: Call, backend: str) -> str | None:
    """Return why engines whose kernels are Triton's cannot run the call, or None."""
    if backend == "triton":
        return None
    return f"its kernels are Triton's, and this call runs in plain torch, on {call.head.device.type} tensors"


def tiles_unsupported_reason(call: Call, backend: str) -> str | None:
    """Return why engines that read operands through tensor maps cannot run the call, or None."""
    head = call.head
    reason = triton_unsupported_reason(call, backend)
    if reason is not None:
        return reason
    if not _has_tensor_maps(head.device):
        return "it needs the tensor maps of a Hopper card"
    dtype = call.options.compute_dtype if call.device == "cuda" else call.options.sum_dtype
    if dtype not in EXPONENTIAL_DTYPES:
        return f"it takes only bfloat16, and the products are in {str(dtype).removeprefix('torch.')}"
    if len(head.inputs) > 2 or any(each.shape[-1] > SECOND_FEATURES for each in head.inputs[1:]):
        return f"it takes one linear term and at most one more, of at most {SECOND_FEATURES} features"
    for input, weight in zip(head.inputs, head.weights):
        if input.shape[-1] % 8:
            return f"it takes only features in a multiple of 8, and there are {input.shape[-1]}"
        if call.options.sharded:
            continue  # ranks choose alike, whatever their layouts; `readable` copies unreadable operands
        mapped = {
            "input": maps_input(input, copies_rows(input, dtype), place),
            "weight": maps_weight(weight, dtype, place),
        }
        for name, maps in mapped.items():
            if not maps:
                return f"it takes only features side by side in rows aligned to 16 bytes, unlike the {name}'s"
    return None


def units_unsupported_reason(call: Call, backend: str, refused: Mapping[str, object]) -> str | None:
    """Return why an engine that uses a CPU's bfloat16 units cannot run the call, or None.

    `refused` are the engine's own reasons, each with True where it applies.
    """
    weights, options = call.head.weights, call.options
    if call.head.device.type != "cpu" or backend != "torch":
        return "it is for CPU tensors, without Triton"
    if any(each.dtype != torch.bfloat16 for each in weights) or options.compute_dtype != torch.bfloat16:
        return "it takes only operands that are bfloat16"
    for reason, applies in refused.items():
        if applies:
            return reason
    fewest = fewest_weights(options.shard)
    if class_count_of_rank(weights[0], options.shard) * call.D < fewest:
        return f"it is for heads of {fewest} weights and more"
    return _cpu_products_refuse()


def uses_units(dtype: torch.dtype, weight_VD: Tensor, shard: VocabShard) -> bool:
    """Return True if products in `dtype` with this weight use a CPU's bfloat16 units."""
    if weight_VD.device.type != "cpu" or not weight_VD.dtype == dtype == torch.bfloat16:
        return False
    enough = class_count_of_rank(weight_VD, shard) * weight_VD.shape[1] >= fewest_weights(shard)
    return enough and _cpu_products_refuse() is None


def fewest_weights(shard: VocabShard) -> int:
    return FEWEST_WEIGHTS * (OF_SHARDED if shard.num_classes else 1)


def class_count_of_rank(weight_VD: Tensor, shard: VocabShard) -> int:
    """Return the number by which all ranks choose alike, about that of one rank's classes."""
    return shard.num_classes // shard.ranks if shard.num_classes else weight_VD.shape[0]


@marked_constant
def _cpu_products_refuse() -> str | None:
    """Return why the CPU's bfloat16 GEMMs cannot run, or None."""
    return gemm.against()


def check_engine(options: Options, device: torch.device) -> None:
    """Raise if the engine, which may have been chosen on another machine, cannot run here."""
    engine, reason = options.engine, None
    if engine not in ENGINES:
        raise ArgumentError(
            f"engine must be one of {ENGINES}, got {engine!r}; choose one with planner.with_graph_facts"
        )
    if backend_of(engine) == "triton":
        reason = reason_against_triton(device, options.compute_dtype, "input")
    if engine in TILED and not _has_tensor_maps(device):
        reason = reason or "this device has no tensor maps of a Hopper card"
    if engine in CPU_UNITS and device.type != "cpu":
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
    """Return True if the device has tensor maps, and wgmma, with which the tiles were measured."""
    return has_warpgroup_mma(device)
