"""A chunk of the exponentials engine holds what is counted, and overwrites nothing too early: rows
scaled for dW's product lie in the memory of their rows of dX.

test_exponentials.py says how the engine runs on the CPU. Products take float32 there, for which
the rows of a bfloat16 gradient have no room. So inputs are float32, under autocast.

Shapes: N tokens, D features, V classes; C tokens of a chunk.
"""

import math
from dataclasses import replace

import pytest
import torch

from lowtide.ops.linear_cross_entropy.planning.division.workspace import DEFAULT_WORKSPACE
from tests.support.extended import all_extended_but
from tests.support.loss import check, differentiate, fused, make_inputs, planned, workspace_for

pytest.importorskip("triton")

from lowtide.core import matmul
from lowtide.core.pending_gradient import PendingGradient
from lowtide.memory import peak_memory
from lowtide.ops.linear_cross_entropy.dispatch import cross_entropy
from lowtide.ops.linear_cross_entropy.engines.exponentials.linear_term import LinearTerm
from lowtide.ops.linear_cross_entropy.engines.formulas.row_math import RowCoefs
from lowtide.ops.linear_cross_entropy.engines.weight_gradient import accumulators, in_torch
from lowtide.ops.linear_cross_entropy.operator import planner
from lowtide.ops.linear_cross_entropy.planning import memory_model, remembered
from lowtide.ops.linear_cross_entropy.planning.division import cost_model, sizes
from tests.ops.linear_cross_entropy.on_exponentials import everywhere, kept_plans, silent  # noqa: F401
from tests.ops.linear_cross_entropy.options.test_several_terms import in_terms

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

KINDS = ["accumulate", "packed", "single_product"]
SMOOTHING = {"label_smoothing": 0.2}


@pytest.fixture
def plans(monkeypatch, kind):
    return kept_plans(monkeypatch, few_tokens=kind == "single_product")


@pytest.mark.parametrize(
    ("reduction", "widths", "frozen"),
    [
        ("mean", (24,), None),
        ("mean", (16, 8), None),
        ("none", (16, 8), None),
        ("mean", (16, 8), "input"),
        ("mean", (16, 8), "linear_weight"),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("kind", "options"),
    all_extended_but(
        [("accumulate", {}), ("single_product", {})],
        [(kind, {}) for kind in KINDS] + [(kind, SMOOTHING) for kind in KINDS[:2]],
    ),
    ids=str,
)
def test_no_overwrite_of_needed_values(device, plans, kind, options, reduction, widths, frozen):
    """Run several chunks in pieces, the last chunk smaller; or one chunk in pieces."""
    N = 75 if device == "cpu" or kind == "single_product" else 1100
    N = 150 if device == "cpu" and kind == "packed" else N
    rounded = make_inputs(N, 24, 203, device=device, dtype=torch.bfloat16, class_weight=bool(options))
    if frozen is not None:
        getattr(rounded, frozen).requires_grad_(False)
    wide = replace(rounded, input=widened(rounded.input))
    if kind == "accumulate":
        wide = replace(wide, linear_weight=widened(wide.linear_weight))
    workspace = 1 << 24
    if kind != "single_product":

        def accepted(plan):
            return plan.rows >= N // 4 and plan.weight_gradient == kind

        planning = {"backend": "triton", "compute_dtype": torch.bfloat16, **options}
        of_all = replace(wide, linear_weight=wide.linear_weight.detach().requires_grad_())
        workspace = workspace_for(of_all, accepted, **planning) + (len(widths) - 1) * (203 * 8 * 8 + N * 64)
    options = {"reduction": reduction, **options}
    upstream = torch.randn(N, device=device) if reduction == "none" else -0.5
    with torch.autocast(device, dtype=torch.bfloat16):
        function = in_terms(cross_entropy, widths)
        found = differentiate(function, wide, upstream, backend="triton", workspace=workspace, **options)
    _, made = plans[-1]
    assert made.exponentials
    if frozen != "linear_weight":
        assert made.weight_gradient == kind
        assert made.access.scales_in_gradient == (frozen is None,) * len(widths)
        assert made.rows == N if kind == "single_product" else N % made.rows
    assert device == "cuda" or made.product_rows < made.rows
    found = {name: part.to(getattr(rounded, name, part).dtype) for name, part in found.items()}
    # The interpreter truncates: twice the rounding.
    check(found, rounded, upstream=upstream, factor=2.0 if device == "cuda" else 4.0, **options)


def widened(tensor):
    return tensor.detach().float().requires_grad_(tensor.requires_grad)


@pytest.mark.parametrize("start", [0, 40])
def test_rows_in_float32_memory(device, start, monkeypatch):
    """Products take bfloat16, dX is float32: half the memory of a row, and none of another's."""
    N, C, D, V = 80, 40, 24, 101
    inputs = make_inputs(N, D, V, device=device, ignored=0)
    dx_ND, dw_VD = torch.full((N, D), 7.0, device=device), torch.empty(V, D, device=device)
    made = planned(inputs, None, backend="triton", compute_dtype=torch.bfloat16)
    access = made.access._replace(dtype=torch.bfloat16, scales_in_gradient=(True,))
    made = replace(made, access=access, weight_gradient="accumulate")
    operand = matmul.Operand(inputs.input.detach(), inputs.linear_weight.detach(), torch.bfloat16, True, None)
    dx, sum = PendingGradient(dx_ND, None, None), accumulators.TritonFloatSum(dw_VD)
    term = LinearTerm(operand, dx, sum, made, None, place=0, smoothing=False)

    def widened_product(out, a, b, *, add=False):
        assert b.dtype == torch.bfloat16
        assert b.untyped_storage().data_ptr() == dx_ND.untyped_storage().data_ptr()
        torch.mm(a.float(), b.float(), out=out)

    monkeypatch.setattr(in_torch, "product", widened_product)
    rows = slice(start, start + C)
    e_CV, scale_C = torch.rand(C, V, device=device).bfloat16(), torch.rand(C, device=device)
    x_CD = inputs.input.detach()[rows].bfloat16()
    row = RowCoefs(inputs.target[rows], *[torch.zeros(C, device=device)] * 3)
    class_C, order_C = inputs.target[rows].sort()
    hit_N = torch.zeros(N, device=device)
    target_rows = inputs.input.detach(), hit_N, class_C, order_C + start
    term.add_chunk(e_CV, x_CD, row, scale_C, rows, target_rows, first=True, last=True)
    scaled_CD = scale_C.double()[:, None] * x_CD.double()
    exact_VD, magnitude_VD = (e_CV.double().t() @ each for each in (scaled_CD, scaled_CD.abs()))
    # Each number is rounded once (truncated, by the interpreter), its sum in float32.
    assert ((dw_VD - exact_VD).abs() <= (2**-7 + 2**-20) * magnitude_VD).all()
    others_N = torch.ones(N, dtype=torch.bool, device=device)
    others_N[rows] = False
    assert dx_ND[others_N].eq(7).all()


EXTRAS = {"bias": True, "class_weight": True, "logit_scale": True}


@pytest.mark.parametrize("frozen", [None, "input", "linear_weight"])
@pytest.mark.parametrize("extras", [{}, EXTRAS], ids=["plain", "all"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(("skips", "copied"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("kind", KINDS)
def test_memory_matches_plan(
    device,
    silent,  # noqa: F811
    plans,
    monkeypatch,
    kind,
    skips,
    copied,
    reduction,
    extras,
    frozen,
):
    """In pieces and in chunks, or with parts of tiles, and gathered rows, where rows are skipped.
    copied: a bfloat16 input, whose gradient cannot hold scaled rows."""
    if device == "cuda":
        pytest.skip("test_exponentials_modes.py has the card's own sizes")
    N, D, V = 400, 512, 1504
    monkeypatch.setattr(memory_model, "PRODUCT_ROWS", 64)
    if skips:
        monkeypatch.setattr(sizes, "FEWEST_TOKENS", 1)
        monkeypatch.setattr(sizes, "MOST_OF_SKIPPING", math.inf)
        monkeypatch.setattr(cost_model, "FEWEST_CLASSES_OF_PART", 128)
    remembered.forget()
    # On a card a product has no temporary where it rounds.
    for module in (accumulators, in_torch):
        monkeypatch.setattr(module, "product", lambda *arguments, **options: None)
    inputs = make_inputs(N, D, V, dtype=torch.bfloat16, **extras)
    if not copied:
        inputs = replace(inputs, input=widened(inputs.input))
    if kind == "accumulate":
        inputs = replace(inputs, linear_weight=widened(inputs.linear_weight))
    workspace = DEFAULT_WORKSPACE["cpu"]  # whole, as so few tokens do not have it
    if kind != "single_product":

        def accepted(plan):
            return plan.rows >= N // 3 and plan.weight_gradient == kind and plan.skips_ignored == skips

        workspace = workspace_for(inputs, accepted, backend="triton", compute_dtype=torch.bfloat16)
    if frozen is not None:
        getattr(inputs, frozen).requires_grad_(False)
    upstream = torch.ones((N,) if reduction == "none" else ())

    def step():
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = fused(inputs, workspace=workspace, reduction=reduction, backend="triton")
        return loss.detach(), *torch.autograd.grad(loss, list(inputs.leaves().values()), upstream)

    beside = sum(each.nbytes for each in step())
    if reduction == "none":
        beside += 2 * 4 * N  # statistics, for backward
    with peak_memory(device) as peak:
        step()
    arguments, made = plans[-1]
    assert made.exponentials
    assert made.weight_gradient == kind or frozen == "linear_weight"
    assert made.rows > made.product_rows
    assert made.skips_ignored == skips
    # Memory reserved for vectors is never all used; the rows of targets are freed before dX.
    unused = 320 * N + 52 * V + 10_000 + (kind == "single_product") * 4 * N * (N + D)
    foretold = planner.peak_bytes(*arguments)
    assert foretold <= workspace
    if kind != "accumulate":  # the weight as the interpreter takes it, and the part of it that is planned for
        beside += V * D * 4
        foretold -= made.operand_classes * D * 4
    assert foretold - unused <= peak.bytes - beside <= foretold


@pytest.mark.parametrize("kind", ["accumulate"])
def test_memory_matches_plan_no_grad(device, silent, plans, kind):  # noqa: F811
    """Nothing of a chunk is left when the next is made, nor copies of its rows."""
    if device == "cuda":
        pytest.skip("test_exponentials_modes.py has the card's own sizes")
    N, D, V = 1200, 512, 1504
    inputs = make_inputs(N, D, V, dtype=torch.bfloat16)

    def step():
        with torch.no_grad(), torch.autocast(device, dtype=torch.bfloat16):
            fused(inputs, workspace=900_000, backend="triton")

    step()
    with peak_memory(device) as peak:
        step()
    arguments, made = plans[-1]
    assert 3 * made.rows <= N
    foretold = planner.peak_bytes(*arguments)
    assert foretold <= 900_000
    beside = V * D * 4 - made.operand_classes * D * 4  # the weight as the interpreter takes it
    assert peak.bytes - beside <= foretold
