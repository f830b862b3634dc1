"""Ignored rows on the path without a pass over the logits: kernels end before them, and nobody on
the host knows how many there are.

On the CPU through Triton's interpreter, as in test_exponentials.py; memory that nothing has written
holds NaN (tests/support/unwritten.py).

Shapes: N tokens, D features, V classes; C tokens of a chunk.
"""

from dataclasses import replace

import numpy
import pytest
import torch

from tests.support.loss import (
    check_log_probs,
    differentiate,
    differentiate_log_probs,
    fused,
    fused_log_probs,
    make_inputs,
    planned,
    workspace_for,
)

pytest.importorskip("triton")

from lowtide.ops.linear_cross_entropy.engines.exponentials import input_gradient
from lowtide.ops.linear_cross_entropy.engines.gemm import counted_rows_triton
from lowtide.ops.linear_cross_entropy.planning import remembered
from lowtide.ops.linear_cross_entropy.planning.division import cost_model, sizes
from tests.ops.linear_cross_entropy.engines.gemm.ignored_rows import (
    OPTIONS,
    PATTERNS,
    N,
    V,
    any_number_of_tokens,  # noqa: F401
    ignored,
    inputs_for,
    with_ignored,
)
from tests.ops.linear_cross_entropy.on_exponentials import (
    dtype_on,
    everywhere,  # noqa: F401
    run,
    tokens_are_few,
    with_options,
)
from tests.ops.linear_cross_entropy.options.test_several_terms import in_terms
from tests.support.extended import all_extended_but

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


# The order of rows.


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
@pytest.mark.parametrize("rows", [1, 75, 3000])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_order_of_rows(device, monkeypatch, pattern, rows, dtype):
    monkeypatch.setattr(counted_rows_triton, "BLOCK", 256)
    monkeypatch.setattr(counted_rows_triton, "WIDTH", 1024)
    ignored_N = ignored(pattern, rows)
    label_N2 = torch.full((rows, 2), 7, dtype=dtype)
    label_N2[:, 1] = torch.where(ignored_N, 255 if dtype == torch.uint8 else -100, torch.arange(rows) % 250)
    label_N = label_N2.to(device)[:, 1]  # not side by side
    ignore_index = 255 if dtype == torch.uint8 else -100
    order = counted_rows_triton.order_rows(label_N, ignore_index)
    assert order.row_N.tolist() == ignored_N.to(torch.uint8).argsort(stable=True).tolist()
    assert torch.equal(order.place_N[order.row_N].cpu(), torch.arange(rows))
    assert order.number.tolist() == [max(1, rows - int(ignored_N.sum()))]


# Results.


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_patterns(device, pattern, reduction):
    inputs = inputs_for(device, pattern)
    upstream = torch.randn(N, device=device) if reduction == "none" else -0.5
    run(inputs, reduction=reduction, upstream=upstream)
    assert planned(inputs, None, backend="triton").skips_ignored


@pytest.mark.parametrize("pattern", ["all", "prefixes"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(
    "kind", all_extended_but(["accumulate", "single_product"], ["accumulate", "packed", "single_product"])
)
def test_ways_and_chunks(device, monkeypatch, kind, reduction, pattern):
    """In several chunks, of which the last ones have no row that counts; or at once."""
    few = kind == "single_product"
    tokens = 16 * N if device == "cuda" else N  # a chunk of a packed sum has hundreds of rows there
    tokens_are_few(monkeypatch, few)
    inputs = inputs_for(device, pattern, tokens, dtype=torch.bfloat16, class_weight=True)
    if kind == "accumulate":
        inputs = replace(inputs, linear_weight=inputs.linear_weight.detach().float().requires_grad_())
    planning = {"backend": "triton", "compute_dtype": torch.bfloat16}
    workspace = 1 << 24
    if not few:

        def accepted(plan):
            in_chunks = tokens // 4 <= plan.rows < tokens
            return plan.weight_gradient == kind and in_chunks and plan.skips_ignored

        workspace = workspace_for(inputs, accepted, **planning)
    plan = planned(inputs, workspace, **planning)
    assert plan.weight_gradient == kind
    assert plan.skips_ignored
    assert (plan.rows >= tokens) == few
    upstream = torch.randn(tokens, device=device) if reduction == "none" else -0.5
    with torch.autocast(device, dtype=torch.bfloat16):
        found = differentiate(
            fused, inputs, upstream, backend="triton", workspace=workspace, reduction=reduction
        )
    sizes.FEWEST_TOKENS = 1 << 40  # undone by the fixture
    remembered.forget()
    with torch.autocast(device, dtype=torch.bfloat16):
        expected = differentiate(
            fused, inputs, upstream, backend="triton", workspace=workspace, reduction=reduction
        )
    assert torch.equal(found["loss"].isnan(), expected["loss"].isnan())
    for name, part in found.items():
        torch.testing.assert_close(part, expected[name], rtol=2**-7, atol=1e-3, equal_nan=True, msg=name)
    assert not found["input"][ignored(pattern, tokens).to(device)].any()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("learned", [False, True])
def test_options(device, options, reduction, learned):
    inputs, options, upstream = with_options(device, options, reduction, learned, D=24)
    inputs = with_ignored(inputs, "prefixes")
    run(inputs, reduction=reduction, upstream=upstream, **options)


@pytest.mark.parametrize("pattern", ["all", "prefixes", "none"])
@pytest.mark.parametrize("learned", [False, True])
def test_log_probs(device, pattern, learned):
    inputs = inputs_for(device, pattern, bias=learned)
    upstream = [torch.randn(N, device=device) for _ in range(3)]
    actual = differentiate_log_probs(fused_log_probs, inputs, upstream, backend="triton")
    check_log_probs(actual, inputs, upstream)


def test_row_weights(device):
    inputs = with_ignored(make_inputs(N, 24, V, device=device, dtype=dtype_on(device)), "random")
    inputs = replace(
        inputs, row_weight=torch.rand(N, device=device).masked_fill(inputs.target < 0, torch.nan)
    )
    run(inputs)


@pytest.mark.extended
def test_two_terms_and_leading_dimensions(device):
    """The narrow second term, and an input that has no view [N, D]."""
    inputs = inputs_for(device, "prefixes")
    upstream = torch.randn(N, device=device)
    options = {"backend": "triton", "reduction": "none"}
    from lowtide.ops.linear_cross_entropy.dispatch import cross_entropy

    found = differentiate(in_terms(cross_entropy, (16, 8)), inputs, upstream, **options)
    wider = torch.randn(5, 20, 24, device=device, dtype=inputs.input.dtype)
    with torch.no_grad():
        wider[:, :15] = inputs.input.view(5, 15, 24)
    sliced = replace(inputs, input=wider[:, :15].requires_grad_(), target=inputs.target.view(5, 15))
    other = differentiate(fused, sliced, upstream.view(5, 15), **options)
    expected = differentiate(fused, inputs, upstream, **options)
    for name, part in expected.items():
        torch.testing.assert_close(other[name].view(part.shape), part, rtol=0, atol=0)
        torch.testing.assert_close(found[name], part, rtol=2**-6, atol=2e-2)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("options", all_extended_but([{}], [{}, {"label_smoothing": 0.2}]), ids=str)
def test_poison_in_ignored_rows(device, reduction, options):
    """Rows that do not count are not read: what they hold reaches nothing, not even dW."""
    inputs = inputs_for(device, "prefixes", bias=True)
    upstream = torch.randn(N, device=device) if reduction == "none" else 1.0
    options = {"backend": "triton", "reduction": reduction, **options}
    expected = differentiate(fused, inputs, upstream, **options)
    with torch.no_grad():
        inputs.input[ignored("prefixes").to(device)] = torch.nan
    found = differentiate(fused, inputs, upstream, **options)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def _in_one_order(a, b, dtype=None):
    return (a[:, :, None].astype(dtype) * b[None].astype(dtype)).sum(1)


@pytest.mark.extended
@pytest.mark.parametrize("splits", [False, True])
def test_bits_of_other_rows(device, monkeypatch, splits):
    """Which rows are ignored changes no bit of another row's loss. It changes none of its dX where
    no tile of dX is split, and the order of the sum over classes where one is.

    In the interpreter a product's bits are those of NumPy's BLAS, which on some processors depend
    on the row's place in a tile. So there each number is summed in one order.
    """
    if device == "cpu":
        monkeypatch.setattr(numpy, "matmul", _in_one_order)
    monkeypatch.setattr(cost_model, "FEWEST_CLASSES_OF_PART", 16 if splits else V)
    monkeypatch.setattr(input_gradient, "multiprocessors", lambda device: 7)
    divided, product = [], input_gradient._parts_kernel

    class Counted:
        def __getitem__(self, grid):
            divided.append(grid)
            return product[grid]

    monkeypatch.setattr(input_gradient, "_parts_kernel", Counted())
    tolerance = {"rtol": 1e-2 if device == "cuda" else 1e-5, "atol": 1e-3}
    rows = 10 * N if device == "cuda" else N
    inputs = inputs_for(device, "none", rows)
    upstream = torch.randn(rows, device=device)
    options = {"backend": "triton", "reduction": "none"}
    expected = differentiate(fused, inputs, upstream, **options)
    for pattern in ("random", "suffix", "one"):
        kept = ~ignored(pattern, rows).to(device)
        fewer = replace(inputs, target=inputs.target.masked_fill(~kept, -100))
        found = differentiate(fused, fewer, upstream, **options)
        assert torch.equal(found["loss"][kept], expected["loss"][kept])
        if splits:
            torch.testing.assert_close(found["input"][kept], expected["input"][kept], **tolerance)
        else:
            assert torch.equal(found["input"][kept], expected["input"][kept])
        assert not found["loss"][~kept].any()
        assert not found["input"][~kept].any()
    assert bool(divided) == splits
