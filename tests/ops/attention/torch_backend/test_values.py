"""Results and first gradients against float64, over sizes, masks, biases, options and dtypes."""

import pytest
import torch
import torch.nn.functional as F

import lowtide
from lowtide import attn_bias as masks
from tests.ops.attention.helpers import check, dense, differentiate, make_case, make_upstream, ours
from tests.support.budgets import HALVES, norm

BACKENDS = ["torch", "reference"]
DTYPES = [torch.float32, torch.float64, *HALVES]


def run(case, backend="torch", upstream=None):
    upstream = make_upstream(case) if upstream is None else upstream
    check(differentiate(ours, case, upstream, backend=backend), case, upstream)


LENGTHS = [1, 2, 3, 31, 113, 239, 799, 1023]


@pytest.mark.parametrize(
    ("M", "N"), [*zip(LENGTHS, reversed(LENGTHS)), *zip(LENGTHS, LENGTHS), (1023, 2), (7, 799)]
)
def test_lengths(device, M, N):
    run(make_case(1, M, N, 2, K=16, device=device))


@pytest.mark.parametrize(
    ("K", "E"), [(1, 1), (3, 8), (31, 34), (40, 3), (64, 80), (128, 160), (258, 512), (512, 1)]
)
def test_features(device, K, E):
    run(make_case(1, 31, 47, 2, K=K, E=E, device=device))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_dtypes(device, backend, dtype):
    run(
        make_case(2, 65, 130, 4, 2, 24, 16, dtype=dtype, device=device, bias=(0, 1, 0, 1), softcap=4.0),
        backend,
    )


@pytest.mark.parametrize(("H", "G"), [(1, 1), (6, 1), (6, 2), (6, 3), (6, 6), (640, 1)])
def test_grouped_heads(device, H, G):
    run(make_case(2, 33, 18, H, G, device=device))


MASKS = {
    "causal": masks.LowerTriangularMask(),
    "causal from the bottom right": masks.LowerTriangularFromBottomRightMask(),
    "local": masks.LocalAttentionFromBottomRightMask(9, 4),
    "nothing but the diagonal": masks.LocalAttentionFromBottomRightMask(0, 0),
}
BIASES = [
    tuple((bits >> place) & 1 for place in range(4)) for bits in range(16)
]  # every shape that broadcasts to [B, H, M, N]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("M", "N"), [(37, 37), (20, 61), (61, 20)])
@pytest.mark.parametrize("name", MASKS)
def test_masks(device, name, M, N, backend):
    """Queries that see no key, as where keys are fewer, have results of 0 and finite gradients."""
    run(make_case(M=M, N=N, mask=MASKS[name], device=device), backend)


@pytest.mark.parametrize("M", [1, 600])
@pytest.mark.parametrize("name", MASKS)
def test_masks_several_tiles(device, name, M):
    run(make_case(1, M, 1100, 2, K=8, mask=MASKS[name], device=device))


@pytest.mark.parametrize("shape", BIASES, ids=str)
def test_bias(device, shape):
    run(make_case(bias=shape, G=2, device=device))


@pytest.mark.parametrize("shape", [(0, 1, 1, 1), (0, 1, 0, 1), (1, 0, 1, 0)], ids=str)
@pytest.mark.parametrize("mask", ["causal", "local"])
def test_bias_with_all_options(device, mask, shape):
    options = {"window": (30, -1), "p": 0.2, "seed": 3, "softcap": 2.5, "scale": 0.5}
    run(make_case(2, 40, 40, 4, 2, 8, 5, bias=shape, mask=MASKS[mask], device=device, **options))


@pytest.mark.parametrize("shape", [(0, 1, 1, 1), (1, 0, 0, 1), (0, 0, 0, 1), (0, 1, 1, 0)], ids=str)
def test_bias_several_tiles(device, shape):
    run(make_case(2, 600, 700, 2, K=4, bias=shape, device=device))


@pytest.mark.parametrize("only", ["query", "key", "value", "bias"])
def test_gradient_of_one_operand(device, only):
    case = make_case(bias=(0, 1, 0, 1), p=0.3, seed=1, device=device)
    case.trained(only)
    run(case)


@pytest.mark.parametrize("place", [0, 1])
def test_upstream_of_one_output(device, place):
    case = make_case(bias=(0, 1, 0, 1), softcap=3.0, device=device)
    upstream = tuple(each if at == place else None for at, each in enumerate(make_upstream(case)))
    run(case, upstream=upstream)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_mask_hides_whole_rows(device, dtype):
    case = make_case(device=device)
    shown = torch.rand(2, 1, 37, 53, device=device) < 0.4
    shown[1, :, 5:9] = False
    bias = (
        shown if dtype == torch.bool else torch.zeros_like(shown, dtype=dtype).masked_fill(~shown, -torch.inf)
    )
    case = type(case)(case.query, case.key, case.value, bias)
    upstream = make_upstream(type(case)(case.query, case.key, case.value, shown))
    run(case, upstream=upstream)
    out, _ = ours(case)
    assert (out[1, 5:9] == 0).all()


def test_bias_of_minus_infinity_gradient(device):
    case = make_case(bias=(0, 0, 1, 1), device=device)
    with torch.no_grad():
        case.bias[0, 0, 4:6] = -torch.inf
        case.bias[0, 0, :, 7] = -torch.inf
    _, of_lse = upstream = make_upstream(case)
    of_lse[:, :, 4:6] = 0
    run(case, upstream=upstream)


@pytest.mark.parametrize(
    ("B", "M", "N", "H"), [(0, 3, 4, 2), (2, 0, 4, 2), (2, 3, 0, 2), (2, 3, 4, 0), (0, 0, 0, 0)]
)
@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
def test_empty(device, backend, B, M, N, H):
    case = make_case(B, M, N, H, bias=(0, 1, 0, 1), mask=MASKS["causal"], device=device)
    found = differentiate(ours, case, make_upstream(case), backend=backend)
    assert found["out"].shape == (B, M, H, 8)
    assert found["logsumexp"].shape == (B, H, M)
    assert (found["logsumexp"] == -torch.inf).all()
    for name in ("out", "query", "key", "value", "bias"):
        assert (found[name] == 0).all()
    plain = lowtide.memory_efficient_attention(case.query, case.key, case.value, backend=backend)
    assert (plain == 0).all()
    plain.sum().backward()
    assert (case.key.grad == 0).all()


FEATURELESS = {
    "plain": {},
    "causal": {"mask": MASKS["causal"]},
    "bias": {"bias": (0, 1, 1, 1)},
    "bias of keys, sequences": {
        "B": 1,
        "bias": (0, 1, 0, 1),
        "mask": masks.BlockDiagonalMask.from_seqlens([9, 28], [13, 40]),
    },
    "all": {"bias": (1, 0, 0, 1), "mask": MASKS["causal"], "p": 0.3, "seed": 2, "softcap": 2.0, "scale": 0.3},
}


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
@pytest.mark.parametrize(("K", "E"), [(0, 5), (0, 1), (3, 0), (0, 0)])
@pytest.mark.parametrize("name", FEATURELESS)
def test_no_features(device, name, K, E, backend):
    """Without key features a score is its bias; without value features there is only logsumexp."""
    run(make_case(**{"B": 2, "G": 2, "K": K, "E": E, "device": device} | FEATURELESS[name]), backend)


@pytest.mark.parametrize("N", [4, 0])
@pytest.mark.parametrize(("K", "E"), [(0, 5), (3, 0), (0, 0)])
def test_no_features_match_torch(device, K, E, N):
    query, key, value = (
        torch.randn(1, 2, length, features, device=device, requires_grad=True)
        for length, features in ((3, K), (N, K), (N, E))
    )
    outs = [
        function(query, key, value, scale=0.5)
        for function in (lowtide.scaled_dot_product_attention, F.scaled_dot_product_attention)
    ]
    torch.testing.assert_close(*outs)
    for got, like in zip(torch.autograd.grad(outs[0].sum(), (query, key, value)), (query, key, value)):
        assert got.shape == like.shape
    two_dimensions = lowtide.scaled_dot_product_attention(query[0, 0], key[0, 0], value[0, 0])
    torch.testing.assert_close(two_dimensions, outs[0][0, 0])


@pytest.mark.parametrize("spread", [30.0, 1000.0])
def test_extreme_scores(device, spread):
    run(make_case(spread=spread, device=device))


@pytest.mark.parametrize("fill", [torch.finfo(torch.float32).min, -1e9])
def test_rows_masked_with_large_number(device, fill):
    """As in torch, such a row attends to all keys evenly, and its result is not 0."""
    case = make_case(device=device)
    bias = torch.zeros(1, 1, 37, 53, device=device)
    bias[:, :, 3] = fill
    run(type(case)(case.query, case.key, case.value, bias))


@pytest.mark.parametrize("dtype", HALVES)
def test_bias_of_other_dtype(device, dtype):
    case = make_case(dtype=dtype, device=device)
    bias = torch.randn(1, 4, 1, 53, device=device, requires_grad=True)
    case = type(case)(case.query, case.key, case.value, bias)
    # The result is rounded to the query's dtype, but the logsumexp is as exact as with float32
    # operands.
    upstream = (None, make_upstream(case)[1])
    found, wide = (differentiate(ours, each, upstream) for each in (case, case.to(torch.float32)))
    exact = differentiate(dense, case.to(torch.float64), upstream)
    assert found["bias"].dtype == torch.float32
    for name in ("logsumexp", "bias"):
        errors = [norm(each[name].double() - exact[name]) for each in (found, wide)]
        rounding = torch.finfo(torch.float32).eps * norm(exact[name])
        assert errors[0] <= 2 * errors[1] + rounding, f"{name}: the bias was rounded"


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("options", [{}, {"p": 0.3, "seed": 5}])
def test_same_call_same_bits(device, backend, options):
    case = make_case(2, 300, 700, 4, 2, 32, bias=(0, 1, 1, 1), mask=MASKS["causal"], device=device, **options)
    upstream = make_upstream(case)
    first, second = (differentiate(ours, case, upstream, backend=backend) for _ in range(2))
    for name, part in first.items():
        assert torch.equal(part, second[name]), name
