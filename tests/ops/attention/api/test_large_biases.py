"""A bias far below zero on all keys that a query sees: masks of -1e9, or a dtype's lowest number.
Such a row attends to what it sees, as in torch, and its gradients are as exact as those of any
other.

The truth is float64, but for one thing: a bias of -1e9 in float32 swallows the score it is added
to. There the truth's scores are rounded to float32 too, and all after them is float64.

Shapes: B batches, M queries, N keys, H query heads, G key heads.
"""

import pytest
import torch

import lowtide
from lowtide import attn_bias as masks
from lowtide.ops.attention.definition.operands import AttentionOptions
from lowtide.ops.attention.operator import ops
from tests.ops.attention.helpers import (
    INTERPRETED,
    dense,
    differentiate,
    magnitudes,
    make_case,
    make_upstream,
    ours,
    shown,
)
from tests.support.budgets import budget, norm
from tests.support.loss import skip_unless_runnable

pytestmark = [
    INTERPRETED,
    # A tile of queries that are all present may have keys that are absent. Beside such a maximum
    # their weights are infinite, but are stored nowhere.
    pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered in:RuntimeWarning"),
]

FILLS = {
    "-1e4": (-1e4, torch.float32),
    "-65504": (-65504.0, torch.float32),
    "-1e9": (-1e9, torch.float32),
    "lowest": (torch.finfo(torch.float32).min, torch.float32),
    "-1e9, bfloat16": (-1e9, torch.bfloat16),
    "lowest of bfloat16": (torch.finfo(torch.bfloat16).min, torch.bfloat16),
    "lowest of float16": (torch.finfo(torch.float16).min, torch.float16),
}
MORE = {
    "alone": {},
    "causal": {"mask": masks.LowerTriangularMask()},
    "shared key heads": {"H": 4, "G": 2, "E": 5},
    "soft cap": {"softcap": 2.0},
    "dropout": {"p": 0.3, "seed": 8},
}
# The interpreter is slow: each fill once, and all options with one of them.
GRID = [
    (backend, fill, more)
    for backend in ("reference", "torch", "triton")
    for fill in FILLS
    for more in MORE
    if backend != "triton" or more == "alone" or fill == "-1e9"
]
SWALLOWS = 1e8
"""So large a bias leaves nothing of a score in float32."""


def far_case(fill, more, keys_alone, device):
    """A bias [1, 1, 1, N], every key filled; or [1, 1, M, N]: whole rows, one but a key, a part."""
    number, dtype = FILLS[fill]
    case = make_case(**({"B": 1, "M": 40, "N": 40, "H": 2, "K": 16} | MORE[more]), device=device)
    if keys_alone:
        bias = torch.full((1, 1, 1, 40), number)
    else:
        bias = torch.randn(1, 1, 40, 40)
        bias[:, :, 7:10] = number
        bias[:, :, 30, 1:] = number
        bias[:, :, 20, :31] = number
    bias = bias.to(device, dtype).requires_grad_()
    return type(case)(case.query, case.key, case.value, bias, case.mask, case.options)


def sizes(case, upstream):
    """magnitudes() of the same weights by near scores: each row of the bias is moved to 0."""
    wide = case.to(torch.float64)
    seen = wide.bias.detach().masked_fill(~shown(case), -torch.inf)
    near = (wide.bias.detach() - seen.amax(-1, keepdim=True)).clamp(-1e3, 0)
    found = magnitudes(type(case)(wide.query, wide.key, wide.value, near, case.mask, case.options), upstream)
    return {**found, "bias": found["bias"].sum_to_size(case.bias.shape)}


@pytest.mark.parametrize("keys_alone", [False, True], ids=["rows", "keys"])
@pytest.mark.parametrize(("backend", "fill", "more"), GRID)
def test_values_and_gradients(device, backend, fill, more, keys_alone):
    """Within twice what eager torch errs in the same dtypes, and a rounding of the sums."""
    skip_unless_runnable(backend, device)
    case = far_case(fill, more, keys_alone, device)
    upstream = make_upstream(case)
    swallowed = bool(case.bias.abs().amax() > SWALLOWS)
    found = differentiate(ours, case, upstream, backend=backend)
    exact = differentiate(dense, case.to(torch.float64), upstream, rounded=swallowed)
    eager, magnitude = differentiate(dense, case, upstream), sizes(case, upstream)
    magnitude["logsumexp"] = exact["logsumexp"]
    for name, got in found.items():
        allowed = budget(eager[name], exact[name], magnitude[name], factor=2.0, dtype=torch.float32)
        error = norm(got.double() - exact[name])
        assert error <= allowed, f"{name}: error {error:.3e} exceeds its budget {allowed:.3e}"


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("fill", ["-65504", "lowest"])
def test_bias_no_grad(device, backend, fill):
    """The others' gradients are the same, bit for bit."""
    skip_unless_runnable(backend, device)
    case = far_case(fill, "causal", False, device)
    upstream = make_upstream(case)
    trained = differentiate(ours, case, upstream, backend=backend)
    case.bias.requires_grad_(False)
    for name, part in differentiate(ours, case, upstream, backend=backend).items():
        assert torch.equal(part, trained[name]), name


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_lowest_number_seen_minus_infinity_hidden(device, backend):
    skip_unless_runnable(backend, device)
    case = far_case("lowest", "alone", False, device)
    with torch.no_grad():
        case.bias[:, :, 8] = -torch.inf
    _, of_lse = upstream = make_upstream(case)
    of_lse[:, :, 8] = 0
    found = differentiate(ours, case, upstream, backend=backend)
    assert (found["logsumexp"][:, :, 8] == -torch.inf).all()
    assert (found["out"][:, 8] == 0).all()
    assert (found["query"][:, 8] == 0).all()
    assert (found["bias"][:, :, 8] == 0).all()
    assert all(part.isfinite().all() for name, part in found.items() if name != "logsumexp")
    torch.testing.assert_close(found["out"][:, 7], case.value.detach().mean(1))


def test_weights_sum_to_one(device):
    """A fortieth, if all 40 scores are -1e9: each value gets that of each upstream gradient."""
    query, key, value = (torch.randn(1, 40, 1, 8, device=device) for _ in range(3))
    value.requires_grad_()
    bias = torch.full((1, 1, 40, 40), -1e9, device=device)
    out = lowtide.memory_efficient_attention(query, key, value, bias)
    (found,) = torch.autograd.grad(out, value, torch.ones_like(out))
    torch.testing.assert_close(found, torch.ones_like(found))


@pytest.mark.parametrize("bias", ["lowest", "none"])
def test_statistics_same_in_backends(device, bias):
    """So that backward is anybody's: the maximum, and the logarithm of the sum beside it."""
    skip_unless_runnable("triton", device)
    case = far_case("lowest", "causal", False, device)
    query, key, value = (each.detach().transpose(1, 2) for each in (case.query, case.key, case.value))
    given = (query, key, value, None if bias == "none" else case.bias.detach(), None, None, None)
    ours, theirs = (
        ops.attention(*given, True, *AttentionOptions(0.25, backend=backend))[1]
        for backend in ("triton", "torch")
    )
    assert ours.shape == (1, 2, 2, 40)
    torch.testing.assert_close(ours, theirs)
