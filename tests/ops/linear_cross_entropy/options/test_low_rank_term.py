"""A second term of few features, as an adapter has: loss and gradients in chunks and as a whole.

Shapes: N tokens, D features, V classes; R features of the second term.
"""

import pytest
import torch

from tests.support.loss import check, differentiate, make_inputs, workspace_for

pytest.importorskip("triton")


from lowtide.ops.linear_cross_entropy.dispatch import cross_entropy
from tests.ops.linear_cross_entropy.on_exponentials import (
    dtype_on,
    everywhere,  # noqa: F401
    kept_plans,
)
from tests.ops.linear_cross_entropy.options.test_several_terms import in_terms

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's NumPy gives these


@pytest.fixture
def made(monkeypatch):
    return kept_plans(monkeypatch, few_tokens=True)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.2}, {"softcap": 3.0, "z_loss": 0.1, "logit_scale": 1.7}], ids=str
)
@pytest.mark.parametrize("whole", [True, False])
def test_chunks_and_blocks(device, made, whole, options, reduction):
    """Rows that are ignored, and a logit below all others' range, so that exponentials are 0."""
    N, D, R, V = (1100, 24, 16, 5008) if device == "cuda" else (75, 24, 8, 203)
    inputs = make_inputs(N, D + R, V, device=device, dtype=dtype_on(device), bias=True, class_weight=True)
    with torch.no_grad():
        inputs.linear_bias[::7] = -200.0
    workspace = None
    if not whole:
        hidden = {name: value for name, value in options.items() if name != "logit_scale"}
        workspace = 6 * V * R + workspace_for(  # that of one term, and a sum for the second
            inputs,
            lambda plan: plan.rows >= N // 2 and plan.weight_gradient != "class_blocks",
            backend="triton",
            **hidden,
        )
    upstream = torch.randn(N, device=device) if reduction == "none" else -0.5
    options = {"reduction": reduction, **options}
    function = in_terms(cross_entropy, (D, R))
    found = differentiate(function, inputs, upstream, backend="triton", workspace=workspace, **options)
    check(found, inputs, upstream=upstream, **options)
    _, planned = made[0]
    assert (planned.rows == N) == whole


@pytest.mark.parametrize(
    ("widths", "frozen"),
    [((24, 8), None), ((24, 16), None), ((24, 8), "input"), ((24, 8), "linear_weight"), ((8,), None)],
)
def test_widths_and_frozen_tensors(device, widths, frozen):
    inputs = make_inputs(D=sum(widths), V=101, device=device, dtype=dtype_on(device))
    if frozen is not None:
        getattr(inputs, frozen).requires_grad_(False)
    check(differentiate(in_terms(cross_entropy, widths), inputs, backend="triton"), inputs)
