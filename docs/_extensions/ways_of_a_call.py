"""Make the tables that say which way a call takes, by asking the functions that choose it:

    ```{ways-of-attention}
    ```
    ```{ways-of-the-loss}
    ```

A card that this machine lacks is asked for with tensors without data, and its capability is given.
"""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from data_tables import add_makers, markdown
from sphinx.application import Sphinx
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.core.bfloat16_units import gemm
from lowtide.ops.linear_cross_entropy.definition.head import Head, Options
from lowtide.ops.linear_cross_entropy.operator.planner import choose_engine
from lowtide.ops.linear_cross_entropy.planning import requirements
from lowtide.ops.linear_cross_entropy.planning.call import Call, CallKind, NeedsGrad
from lowtide.ops.linear_cross_entropy.planning.operands import with_aligned_operands
from lowtide.tools.doctor.attention import table as calls_of_attention
from lowtide.tools.doctor.linear_cross_entropy import AskedLossCall

N, D, V = 8192, 4096, 128_256  # the head of Llama 3 8B
# A machine: the device, whether its card has the tensor maps of a Hopper card, and what the CPU
# lacks.
MACHINES = {
    "Hopper card": ("cuda", True, gemm.NO_UNITS),
    "other NVIDIA card": ("cuda", False, gemm.NO_UNITS),
    "CPU with bfloat16 units": ("cpu", False, None),
    "other CPU": ("cpu", False, gemm.NO_UNITS),
}
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
CALLS: dict[str, dict[str, Any]] = {
    "bfloat16, class indices": {},
    "the same, with bias, class weights, z-loss or row weights": {"bias": True, "class_weights": True},
    "label smoothing": {"label_smoothing": 0.1},
    "a soft cap": {"softcap": 30.0},
    "a learned logit scale": {"learned_scale": True},
    "label smoothing and a soft cap": {"label_smoothing": 0.1, "softcap": 30.0},
    "`linear_log_probs`": {"log_probs": True},
    "a LoRA of rank 16 on the head": {"second": 16},
    "a LoRA of rank 128 on the head": {"second": 128},
    "class probabilities in bfloat16": {"soft": BF16},
    "the same, with a soft cap": {"soft": BF16, "softcap": 30.0},
    "class probabilities in float32": {"soft": FP32},
    "features that are no multiple of 8": {"features": 4100},
    "a weight [D, V] that is transposed": {"transposed": True},
    "fewer than 2^16 weights": {"features": 64, "classes": 512},
    "float32 under autocast to bfloat16": {"dtype": FP32, "products": BF16},
    "float16": {"dtype": FP16},
    "float32": {"dtype": FP32},
    "float64": {"dtype": FP64},
}


def engine_and_reasons(machine: str, **call: Any) -> tuple[str, dict[str, str]]:
    """Return the engine of a call on a machine, and why none preferred to it runs it."""
    device, tensor_maps, against_cpu = MACHINES[machine]
    with (
        patch.object(requirements, "_has_tensor_maps", lambda device: tensor_maps),
        patch.object(gemm, "against", lambda: against_cpu),
        FakeTensorMode(),
    ):
        choice = choose_engine(_call(device, **call))
    return choice.engine, choice.reasons


def _call(
    device: str,
    *,
    dtype: torch.dtype = BF16,
    products: torch.dtype | None = None,
    features: int = D,
    classes: int = V,
    second: int | None = None,
    transposed: bool = False,
    bias: bool = False,
    class_weights: bool = False,
    log_probs: bool = False,
    soft: torch.dtype | None = None,
    softcap: float = 0.0,
    label_smoothing: float = 0.0,
    learned_scale: bool = False,
) -> Call:
    widths = [features] if second is None else [features, second]
    inputs = tuple(torch.empty(N, width, dtype=dtype, device=device) for width in widths)
    weights = tuple(torch.empty(classes, width, dtype=dtype, device=device) for width in widths)
    if transposed:
        weights = (torch.empty(features, classes, dtype=dtype, device=device).t(),)
    bias_V = torch.empty(classes, dtype=dtype, device=device) if bias else None
    options = Options(compute_dtype=products or dtype, softcap=softcap, label_smoothing=label_smoothing)
    wanted = (True,) * len(widths)
    call_kind = CallKind(NeedsGrad(wanted, wanted, bias, learned_scale), log_probs, soft, class_weights)
    head = with_aligned_operands(Head(inputs, weights, bias_V), options)
    return Call(head, options, call_kind)


def attention_table() -> str:
    """Return the backends of calls of attention, as Markdown."""
    rows = [[call, f"`{cpu}`", f"`{cuda}`"] for call, cpu, cuda in calls_of_attention()]
    return markdown(["call", "on the CPU", "on CUDA"], rows)


def loss_table() -> str:
    """Return the engine of each call on each machine, as Markdown."""
    rows = [
        [name, *(f"`{engine_and_reasons(machine, **call)[0]}`" for machine in MACHINES)]
        for name, call in CALLS.items()
    ]
    return markdown(["call", *MACHINES], rows)


def reasons_table() -> str:
    """Return, for each engine, the reasons that `lowtide doctor` gives against it, as Markdown."""
    found: dict[str, dict[str, None]] = {}
    for machine in MACHINES:
        for call in CALLS.values():
            for engine, reason in engine_and_reasons(machine, **call)[1].items():
                found.setdefault(engine, {})[reason] = None
    rows = [[f"`{engine}`", reason] for engine, reasons in found.items() for reason in reasons]
    return markdown(["not this engine", "because"], rows)


def doctor_on_a_cpu() -> str:
    """Return what `lowtide doctor` says of such a call, on a CPU with bfloat16 units."""
    with patch.object(gemm, "against", lambda: None):
        found = AskedLossCall(N, D, V, softcap=30.0, label_smoothing=0.1).describe()
    width = max(map(len, found))
    lines = (f"{name:{width}}   {value}" for name, value in found.items())
    return "\n".join(("```text", *lines, "```"))


MAKERS: dict[str, Callable[[], str]] = {
    "doctor-on-a-cpu": doctor_on_a_cpu,
    "reasons-of-the-loss": reasons_table,
    "ways-of-attention": attention_table,
    "ways-of-the-loss": loss_table,
}


def setup(app: Sphinx) -> dict[str, Any]:
    return add_makers(app, MAKERS)
