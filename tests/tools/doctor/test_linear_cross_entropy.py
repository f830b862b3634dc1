"""The doctor's plan of a linear_cross_entropy is the one that is run."""

from dataclasses import replace

import pytest
import torch

import lowtide
from lowtide.core.bfloat16_units import gemm
from lowtide.ops.linear_cross_entropy.operator import ops
from lowtide.tools.doctor.linear_cross_entropy import AskedLossCall

SMALL = AskedLossCall(200, 16, 500, dtype=torch.float32)
CALLS = (
    SMALL,
    replace(SMALL, dtype=torch.bfloat16, workspace=200_000),
    replace(SMALL, dtype=torch.bfloat16),
    replace(SMALL, bias=True, softcap=5.0, label_smoothing=0.1),
    replace(SMALL, gradients=False),
    replace(SMALL, reduction="none", workspace=100_000),
    replace(SMALL, backend="torch"),
    replace(SMALL, autocast=torch.bfloat16),
    replace(SMALL, probabilities=torch.float64),
    replace(SMALL, z_loss=1e-4, logit_scale=0.5, dtype=torch.bfloat16),
    replace(SMALL, weight=True, reduction="none"),
)


def run(call):
    x, w = (
        torch.zeros(size, call.D, dtype=call.dtype, requires_grad=call.gradients) for size in (call.N, call.V)
    )
    bias = torch.zeros(call.V, dtype=call.dtype, requires_grad=call.gradients) if call.bias else None
    target = torch.zeros(call.N, dtype=torch.long)
    if call.probabilities is not None:
        target = torch.zeros(call.N, call.V, dtype=call.probabilities)
    with torch.autocast("cpu", call.autocast, enabled=call.autocast is not None):
        return lowtide.linear_cross_entropy(
            x,
            w,
            target,
            linear_bias=bias,
            softcap=call.softcap,
            label_smoothing=call.label_smoothing,
            logit_scale=call.logit_scale,
            z_loss=call.z_loss,
            weight=torch.zeros(call.V, dtype=call.dtype) if call.weight else None,
            reduction=call.reduction,
            workspace=call.workspace,
            backend=call.backend,
        )


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_plan(call, monkeypatch):
    made = []
    make_plan = ops.make_plan
    monkeypatch.setattr(ops, "make_plan", lambda *given: made.append(make_plan(*given)) or made[-1])
    run(call)
    assert made == [call.plan()]


@pytest.mark.parametrize("units", [True, False])
def test_reason_that_nobody_can_remove(units, monkeypatch):
    """It stands beside one that can be removed, and not twice."""
    monkeypatch.setattr(gemm, "against", lambda: None if units else gemm.NO_UNITS)
    float32 = "not cpu_exponentials: it takes only operands that are bfloat16"
    assert SMALL.describe()["why"] == (float32 if units else f"{float32}; and {gemm.NO_UNITS}")
    large = replace(SMALL, D=512, V=4096, dtype=torch.bfloat16)
    assert large.describe().get("why") == (None if units else f"not cpu_exponentials: {gemm.NO_UNITS}")


def test_description(monkeypatch):
    monkeypatch.setattr(gemm, "against", lambda: "there is no compiler")  # whatever this CPU has
    found = SMALL.describe()
    assert found["engine"] == "logits_torch"
    assert found["kernels"] == "plain torch"
    dense = 3 * 4 * 200 * 500 - 4 * 16 * (200 + 500)  # three tensors of all logits, without the gradients
    assert found["workspace"] == f"{dense / 1024:,.0f} KiB, the default"
    assert replace(SMALL, N=20_000).describe()["workspace"] == "64 MiB, the default"
    assert found["rows"] == "200 a chunk, 1 chunk"
    assert found["weight gradient"] == "summed over the chunks in float32"
    tight = replace(SMALL, V=5000, dtype=torch.bfloat16, workspace=400_000)
    plan, found = tight.plan(), tight.describe()
    assert found["rows"] == f"{plan.rows} a chunk, {-(-200 // plan.rows)} chunks"
    assert found["products in"] == "float32", "on the CPU"
    assert found["weight gradient"].startswith("class block by class block")
    shared = replace(SMALL, N=2048, D=512, V=32_768, dtype=torch.bfloat16)
    assert shared.plan().weight_gradient == "packed"
    assert "float32, two bytes for each weight beside it" in shared.describe()["weight gradient"]
    assert "weight gradient" not in replace(SMALL, gradients=False).describe()
    assert replace(SMALL, backend="reference").describe()["engine"] == "reference"
    soft = replace(SMALL, dtype=torch.bfloat16, V=1 << 17, probabilities=torch.bfloat16).describe()
    refused = "not cpu_exponentials: it takes only class indices"
    assert soft["why"] == f"{refused}; not cpu_logits: there is no compiler"
    large = replace(SMALL, dtype=torch.bfloat16, V=1 << 17, workspace=8 << 20)
    both = replace(large, softcap=30.0, label_smoothing=0.1).describe()["why"]
    assert both.startswith("not cpu_exponentials: it takes no soft cap with label smoothing; not cpu_logits")
    smooth = replace(large, label_smoothing=0.1).describe()
    assert smooth["why"] == "not cpu_exponentials: there is no compiler"
    classes = replace(large, softcap=30.0).plan().operand_classes
    assert classes < 1 << 17
    copied = replace(large, softcap=30.0).describe()["weight"]
    assert copied == f"copied {classes} classes at a time, from bfloat16 to float32"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workspace": 10}, "workspace must hold one row"),
        ({"reduction": "median"}, "reduction must be one of"),
        ({"backend": "fast"}, "backend must be one of"),
        ({"softcap": 0.0}, "softcap must be"),
        ({"z_loss": -1.0}, "z_loss must be"),
    ],
)
def test_errors_of_the_call(changes, message):
    call = replace(SMALL, **changes)
    for ask in (call.plan, lambda: run(call)):
        with pytest.raises(ValueError, match=message):
            ask()


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a card")
def test_cuda_refused_if_absent():
    with pytest.raises(ValueError, match="the plan depends on the card"):
        replace(SMALL, device="cuda").plan()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_plan_on_cuda():
    found = AskedLossCall(4096, 1024, 32_000, device="cuda").describe()
    hopper = torch.cuda.get_device_capability()[0] == 9
    assert ("why" not in found) == hopper
    assert found["workspace"].endswith("the default")
