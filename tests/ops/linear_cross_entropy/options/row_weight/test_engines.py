"""row_weight beside every option, on every engine.

Shapes: N tokens, D features, V classes.
"""

from dataclasses import replace

import pytest
import torch

from lowtide.core.bfloat16_units import gemm
from lowtide.ops.linear_cross_entropy.dispatch import cross_entropy
from lowtide.ops.linear_cross_entropy.planning import requirements
from tests.ops.linear_cross_entropy.on_exponentials import (
    dtype_on,
    put_everywhere,
    run,
    several_blocks,
    with_options,
)
from tests.ops.linear_cross_entropy.options.helpers import ALL, WARNINGS
from tests.ops.linear_cross_entropy.options.row_weight.helpers import upstream_of, weighted
from tests.ops.linear_cross_entropy.options.test_options import DTYPES, KINDS, REDUCTIONS, check_fused
from tests.ops.linear_cross_entropy.options.test_options import workspace_of as few
from tests.ops.linear_cross_entropy.options.test_several_terms import in_terms
from tests.support.extended import all_extended_but
from tests.support.loss import (
    HALVES,
    check,
    differentiate,
    fused,
    make_inputs,
    planned,
    skip_unless_runnable,
    smallest_workspace,
    workspace_for,
)

pytestmark = WARNINGS


@pytest.mark.parametrize("workspace", ["default", "few"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", ["plain", *KINDS])
def test_with_each_option(device, kind, reduction, dtype, workspace):
    inputs, options = weighted(device=device, dtype=dtype, kind=kind)
    for backend in ("auto", "torch") if device == "cuda" else ("torch",):
        chosen = options | {"reduction": reduction, "backend": backend}
        upstream = upstream_of(inputs, reduction)
        check_fused(inputs, upstream, workspace=few(workspace, inputs, **chosen), **chosen)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", ["plain", *ALL])
def test_triton(device, kind, reduction, dtype):
    skip_unless_runnable("triton", device)
    inputs, options = weighted(5, 3, 21, device=device, dtype=dtype, kind=kind, ignored=0.4)
    chosen = options | {"reduction": reduction, "backend": "triton"}
    check_fused(inputs, upstream_of(inputs, reduction), **chosen)


SHIFTED = [
    {},
    {"z_loss": 0.02, "label_smoothing": 0.3, "logit_scale": -1.3},
    {"z_loss": 0.02, "softcap": 5.0, "logit_scale": 1.7},
]


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("options", SHIFTED, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_exponentials(device, reduction, options, learned, monkeypatch):
    pytest.importorskip("triton")
    put_everywhere(device, monkeypatch)
    inputs, options, upstream = with_options(device, options, reduction, learned, D=24)
    row_weight = make_inputs(len(inputs.target), device=device, row_weight=True, ignored=0).row_weight
    inputs = replace(inputs, row_weight=row_weight.masked_fill(inputs.target < 0, torch.nan))
    run(inputs, reduction=reduction, upstream=upstream, **options)


@pytest.mark.parametrize("options", all_extended_but(SHIFTED[1:], SHIFTED), ids=str)
@pytest.mark.parametrize("reduction", all_extended_but(["mean", "none"], REDUCTIONS))
def test_class_blocks(device, reduction, options, monkeypatch):
    """The float32 sum of the weight's gradient does not fit."""
    pytest.importorskip("triton")
    put_everywhere(device, monkeypatch)
    made = {"bias": True, "logit_scale": True, "row_weight": True}
    N, V = several_blocks(device)
    inputs = make_inputs(N, 24, V, device=device, dtype=torch.bfloat16, **made)
    options = {name: value for name, value in options.items() if name != "logit_scale"}
    workspace = 20_000 + smallest_workspace(lambda size: planned(inputs, size, backend="triton", **options))
    assert planned(inputs, workspace, backend="triton", **options).weight_gradient == "class_blocks"
    upstream, factor = upstream_of(inputs, reduction), 2.0 if device == "cuda" else 4.0
    run(inputs, reduction=reduction, upstream=upstream, workspace=workspace, factor=factor, **options)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_soft_targets(device, reduction, monkeypatch):
    pytest.importorskip("triton")
    put_everywhere(device, monkeypatch)
    made = {"probabilities": True, "class_weight": True, "bias": True, "row_weight": True}
    inputs = make_inputs(37, 24, 112, device=device, dtype=dtype_on(device), **made)
    chosen = {"label_smoothing": 0.1, "z_loss": 0.02, "reduction": reduction, "backend": "triton"}
    assert planned(inputs, None, **chosen).soft_targets
    check_fused(inputs, upstream_of(inputs, reduction), **chosen)


@pytest.mark.parametrize("weight_gradient", ["accumulate", "packed", "class_blocks"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_cpu_exponentials(reduction, weight_gradient, monkeypatch):
    if not gemm.available():
        pytest.skip("this CPU has no units for bfloat16, or there is no compiler")
    monkeypatch.setattr(requirements, "FEWEST_WEIGHTS", 0)
    made = {"bias": True, "class_weight": True, "row_weight": True}
    inputs = make_inputs(
        1100 if weight_gradient == "accumulate" else 370, 160, 503, dtype=torch.bfloat16, **made
    )
    kind = "packed" if weight_gradient == "class_blocks" else weight_gradient
    workspace = workspace_for(inputs, lambda plan: plan.weight_gradient == kind, z_loss=0.01)
    workspace = workspace * 3 // 4 if weight_gradient == "class_blocks" else workspace
    plan = planned(inputs, workspace, z_loss=0.01)
    assert plan.cpu_exponentials
    assert plan.weight_gradient == weight_gradient
    check_fused(inputs, upstream_of(inputs, reduction), reduction=reduction, z_loss=0.01, workspace=workspace)


@pytest.mark.parametrize("kind", ["plain", *KINDS])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_reference(device, reduction, kind):
    inputs, options = weighted(device=device, dtype=torch.float64, kind=kind)
    check_fused(inputs, upstream_of(inputs, reduction), reduction=reduction, backend="reference", **options)


@pytest.mark.parametrize("widths", [(8, 11), (16, 1, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_several_terms(device, reduction, dtype, widths):
    inputs, options = weighted(device=device, dtype=dtype, kind="all, classes")
    options = options | {"reduction": reduction}
    upstream = upstream_of(inputs, reduction)
    check(
        differentiate(in_terms(cross_entropy, widths), inputs, upstream, **options),
        inputs,
        upstream=upstream,
        **options,
    )


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_autocast(device, reduction, dtype):
    inputs, options = weighted(device=device, dtype=dtype, bias=True)
    wide = inputs.to(torch.float32)
    with torch.autocast(device, dtype):
        found = differentiate(fused, wide, -0.7, reduction=reduction, **options)
    found = {name: each if name == "loss" else each.to(dtype) for name, each in found.items()}
    check(found, inputs, upstream=-0.7, reduction=reduction, **options)
