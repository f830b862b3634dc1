"""The rows' vectors, the factor of a mean and the loss: each in one Triton launch, and in torch.

The vectors have the bits of plain torch, on the CPU; sums are checked against float64.

Shapes: N tokens, V classes.
"""

from dataclasses import fields

import pytest
import torch

from lowtide.ops.linear_cross_entropy.definition.head import Head, Labels
from lowtide.ops.linear_cross_entropy.engines import row_loss
from lowtide.ops.linear_cross_entropy.engines.formulas.row_math import ExcludedTargetStats, SoftmaxStats
from lowtide.ops.linear_cross_entropy.engines.loss_engine import make_rows
from lowtide.ops.linear_cross_entropy.engines.row_loss import RowLoss
from tests.support.loss import make_inputs, planned, skip_unless_runnable

pytest.importorskip("triton")

from lowtide.ops.linear_cross_entropy.engines import row_loss_triton

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

# The error of a sum of numbers above 0 that is added up in blocks, in which each number goes
# through at most a dozen additions.
SUM_ERROR = 1e-6
OPTIONS = [
    {},
    {"label_smoothing": 0.1},
    {"z_loss": 0.02},
    {"label_smoothing": 0.3, "z_loss": 0.02, "ignore_index": 5},
]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


@pytest.fixture(autouse=True)
def _as_on_a_card(device, monkeypatch):
    """A target that is no class raises on the CPU; here it makes NaN there too."""
    skip_unless_runnable("triton", device)
    for module in (row_loss, row_loss_triton):
        monkeypatch.setattr(module, "check_classes", lambda *arguments: None)


def both(device, N=700, V=61, *, weighted=False, invalid=True, target_dtype=torch.int64, **options):
    """Rows of one call in Triton and in torch; row weights lie apart; ignored rows have NaN."""
    inputs = make_inputs(N, 8, V, device=device, class_weight=weighted)
    target_N = torch.randint(V, (N,), device=device)
    target_N[1::7] = ignored = options.get("ignore_index", -100)
    if target_dtype == torch.uint8 and ignored < 0:
        target_N[1::7] = 0  # no number of this dtype is -100
    if invalid:
        target_N[3::97], target_N[5::89] = V, 125 if target_dtype in (torch.uint8, torch.int8) else 1 << 14
    target_N = target_N.to(target_dtype)
    row_weight_N = None
    if weighted:
        row_weight_N = torch.randn(2 * N, device=device)[::2].masked_fill_(target_N == ignored, torch.nan)
    plan = planned(inputs, None, backend="triton", **options)
    head = Head((inputs.input,), (inputs.linear_weight,))
    call = (plan, head, Labels(target_N, inputs.weight, row_weight_N))
    rows = make_rows(*call)
    assert type(rows).__name__ == "TritonRowLoss"
    return rows, RowLoss(*call)


def stats_of(rows, kind, *, smoothed):
    def vector():
        return torch.rand(rows.N, device=rows.device) * 9 + 1

    stats = {"max_N": vector(), "sum_N": vector(), "nll_N": vector()}
    if smoothed:
        stats["smooth_nll_N"] = vector()
    if kind is ExcludedTargetStats:
        stats["target_logit_N"] = vector()
    return kind(**stats)


def assert_equal_bits(found, expected, device):
    assert (found is None) == (expected is None)
    if found is None:
        return
    assert found.dtype == expected.dtype
    if device == "cpu" or not found.is_floating_point():
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    else:  # a card adds and multiplies in one rounding
        torch.testing.assert_close(found, expected, rtol=2**-22, atol=0, equal_nan=True)


@pytest.mark.parametrize("upstream", [None, "dense", "expanded", "half"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_vectors(device, options, weighted, upstream):
    found, expected = both(device, weighted=weighted, **options)
    upstream_N = torch.randn(found.N, device=device)
    if upstream == "expanded":
        upstream_N = upstream_N[0].expand(found.N)
    elif upstream == "half":
        upstream_N = upstream_N.bfloat16()
    given = () if upstream is None else (upstream_N,)
    mine, theirs = found.coefs(*given), expected.coefs(*given)
    for field in fields(theirs):
        assert_equal_bits(getattr(mine, field.name), getattr(theirs, field.name), device)
    assert_equal_bits(found.target_weight_N, expected.target_weight_N, device)
    assert mine.softmax_coef_N.isnan().any()  # coefficients of invalid targets
    assert (mine.softmax_coef_N[mine.ignored_N] == 0).all()
    assert mine.ignored_N.any()


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integer_dtypes(device, dtype):
    found, expected = both(device, target_dtype=dtype, ignore_index=7 if dtype == torch.uint8 else -100)
    assert_equal_bits(found.target_N, expected.target_N, device)
    assert_equal_bits(found.ignored_N, expected.ignored_N, device)
    assert_equal_bits(found.coefs().target_coef_N, expected.coefs().target_coef_N, device)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32], ids=str)
def test_narrow_target_wraps_no_ignore_index(device, dtype):
    """256 + 9 is 9 in eight bits."""
    found, _ = both(device, target_dtype=dtype, invalid=False, ignore_index=256 + 9)
    assert bool(found.ignored_N.any()) == (dtype == torch.int32)


@pytest.mark.parametrize("normalizer", [None, 7.0])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("N", [700, 9001])
def test_mean(device, N, weighted, normalizer):
    """9001 rows are more than two blocks."""
    found, expected = both(device, N, weighted=weighted, invalid=False)
    given = None if normalizer is None else torch.tensor(normalizer, device=device)
    denominator, factor = found.mean(given)
    exact = expected.target_weight_N.double().sum() if given is None else given.double()
    torch.testing.assert_close(denominator.double(), exact, rtol=SUM_ERROR, atol=0)
    assert torch.equal(factor, 1 / denominator)
    assert denominator.dim() == factor.dim() == 0
    if not weighted and given is None:
        assert denominator == (~expected.ignored_N).sum()


@pytest.mark.parametrize("kind", [SoftmaxStats, ExcludedTargetStats])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("N", [1, 700, 9001])
def test_loss(device, N, options, weighted, kind):
    found, expected = both(device, N, weighted=weighted, invalid=False, **options)
    if N == 1:
        assert not expected.ignored_N.any()
    stats = stats_of(found, kind, smoothed="label_smoothing" in options)
    loss_N, theirs_N = found.loss_N(stats), expected.loss_N(stats).masked_fill(expected.ignored_N, 0)
    torch.testing.assert_close(loss_N, theirs_N, rtol=1e-5, atol=1e-6)
    assert (loss_N[found.ignored_N] == 0).all()
    exact, magnitude = loss_N.double().sum(), loss_N.double().abs().sum()
    assert (found.total_loss(stats, None).double() - exact).abs() <= SUM_ERROR * magnitude
    denominator = torch.tensor(3.0, device=device)
    assert torch.equal(found.total_loss(stats, denominator), found.total_loss(stats, None) / denominator)


def test_sums_are_as_exact_as_in_torch(device):
    """100,000 rows: one number after the other would lose five digits more."""
    found, expected = both(device, 100_000, invalid=False)
    stats = stats_of(found, SoftmaxStats, smoothed=False)
    exact = expected.loss_N(stats).double().masked_fill(expected.ignored_N, 0).sum()
    assert (found.total_loss(stats, None).double() / exact - 1).abs() < 5e-7


def test_invalid_target_makes_nan(device):
    found, _ = both(device, 700)
    stats = stats_of(found, SoftmaxStats, smoothed=False)
    assert found.total_loss(stats, None).isnan()
    assert found.mean(None)[0].isnan()
    assert found.loss_N(stats).isnan().sum() == found.target_weight_N.isnan().sum() > 0


@pytest.mark.parametrize("N", [0, 5])
def test_no_rows(device, N):
    """A mean of nothing is NaN, its gradients are 0 times 1."""
    inputs = make_inputs(N, 8, 61, device=device)
    plan = planned(inputs, None, backend="triton")
    target_N = torch.full((N,), -100, device=device)
    rows = make_rows(plan, Head((inputs.input,), (inputs.linear_weight,)), Labels(target_N))
    denominator, factor = rows.mean(None)
    assert denominator.isnan()
    assert factor == 1
    assert rows.mean(torch.tensor(4.0, device=device))[1] == 1
    stats = stats_of(rows, SoftmaxStats, smoothed=False)
    assert rows.total_loss(stats, None) == 0
    assert rows.total_loss(stats, denominator).isnan()
    assert (rows.coefs().target_coef_N == 0).all()


def test_probabilities_and_plain_torch_have_their_own_rows(device):
    inputs = make_inputs(9, 8, 61, device=device, probabilities=True)
    head = Head((inputs.input,), (inputs.linear_weight,))
    assert type(make_rows(planned(inputs, None, backend="triton"), head, Labels(inputs.target))) is RowLoss
    inputs = make_inputs(9, 8, 61, device=device)
    assert type(make_rows(planned(inputs, None, backend="torch"), head, Labels(inputs.target))) is RowLoss
