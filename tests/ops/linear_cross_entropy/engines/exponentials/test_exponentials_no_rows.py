"""The path without a pass over the logits, of a call without rows or with none that counts: zero
gradients, however the weight's is formed (tests/test_no_rows.py has the other paths)."""

import pytest
import torch

from tests.ops.linear_cross_entropy.on_exponentials import everywhere  # noqa: F401
from tests.support.loss import differentiate, fused, make_inputs, planned, smallest_workspace

# Triton's interpreter computes with numpy, which warns of the logarithm of an ignored row's sum.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("N", [0, 7], ids=["no rows", "all ignored"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("options", [{}, {"z_loss": 0.1, "softcap": 3.0}, {"label_smoothing": 0.1}], ids=str)
def test_no_rows_gradients_zero(device, options, reduction, N):
    made = {"bias": True, "class_weight": True, "logit_scale": True, "ignored": 1.0}
    inputs = make_inputs(N, 32, 80, device=device, dtype=torch.bfloat16, **made)
    options = {"reduction": reduction, "backend": "triton", **options}
    least = smallest_workspace(lambda workspace: fused(inputs, workspace=workspace, **options))
    ways = set()
    for workspace in (1 << 24, least, least * 5 // 4, 2 * least, 8 * least):
        plan = planned(inputs, workspace, **options)
        assert plan.exponentials
        ways.add(plan.weight_gradient)
        gradients = differentiate(fused, inputs, workspace=workspace, **options)
        del gradients["loss"]
        for name, gradient in gradients.items():
            assert torch.equal(gradient, torch.zeros_like(gradient)), f"{name}, {plan.weight_gradient}"
    assert ways & {"single_product", "accumulate"}
    if N or "label_smoothing" in options:
        assert "class_blocks" in ways
    else:  # without target rows a single product fits in any workspace
        assert ways == {"single_product"}
