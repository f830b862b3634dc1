"""Masks against their definitions in words, one score at a time."""

import pytest
import torch

import lowtide
from lowtide import attn_bias as masks
from lowtide.ops.attention.definition import masks as definition
from lowtide.ops.attention.definition.intervals import visible
from lowtide.ops.attention.definition.masks import intervals, window_band

SIZES = [(1, 1), (5, 5), (4, 9), (9, 4), (1, 7), (7, 1), (3, 0), (0, 3)]


def seen(mask, M, N, window=None):
    """What intervals say, and that they never go back."""
    found = intervals(mask, None if window is None else window_band(window), M, N, torch.device("cpu"))
    if found is None:
        return torch.ones(M, N, dtype=torch.bool)
    for vector in found:
        assert (vector.diff() >= 0).all()
        assert ((vector >= 0) & (vector <= N)).all()
    return visible(found, N)


def in_words(M, N, rule):
    return torch.tensor([[bool(rule(i, j)) for j in range(N)] for i in range(M)]).reshape(M, N)


RULES = {
    "LowerTriangularMask": (masks.LowerTriangularMask(), lambda i, j, M, N: j <= i),
    "LowerTriangularFromBottomRightMask": (
        masks.LowerTriangularFromBottomRightMask(),
        lambda i, j, M, N: j <= i + N - M,
    ),
    "LocalAttentionFromBottomRightMask": (
        masks.LocalAttentionFromBottomRightMask(2, 1),
        lambda i, j, M, N: -2 <= j - (i + N - M) <= 1,
    ),
    "no mask": (masks.AttentionBias(), lambda i, j, M, N: True),
}


@pytest.mark.parametrize(("M", "N"), SIZES)
@pytest.mark.parametrize("name", RULES)
def test_masks_match_rules(name, M, N):
    mask, rule = RULES[name]
    expected = in_words(M, N, lambda i, j: rule(i, j, M, N))
    assert torch.equal(seen(mask, M, N), expected)
    dense = mask.materialize((2, 3, M, N), dtype=torch.float64)
    assert dense.shape == (2, 3, M, N)
    assert dense.dtype == torch.float64
    assert torch.equal(dense == 0, expected.expand(2, 3, M, N))
    assert ((dense == 0) | (dense == -torch.inf)).all()


@pytest.mark.parametrize(("M", "N"), SIZES)
@pytest.mark.parametrize(
    "window",
    [(0, 0), (2, 1), (3, -1), (None, 2), (-1, -1), (None, 2**31 - 2), (2**31, 1), (2**40, 2**63)],
)
@pytest.mark.parametrize("mask", [None, masks.LowerTriangularMask()])
def test_window_and_mask_intersect(mask, window, M, N):
    left, right = (float("inf") if side in (None, -1) else side for side in window)

    def rule(i, j):
        return -left <= j - (i + N - M) <= right and (mask is None or j <= i)

    assert torch.equal(seen(mask, M, N, window), in_words(M, N, rule))


LENGTHS = [([3, 1, 4], [3, 1, 4]), ([2, 0, 5, 1], [4, 3, 2, 0]), ([6], [2]), ([0, 0], [0, 3])]


@pytest.mark.parametrize(("q_lengths", "k_lengths"), LENGTHS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, (1, 1), (-1, 0)])
def test_sequences_match_rules(q_lengths, k_lengths, causal, window):
    kind = masks.BlockDiagonalCausalMask if causal else masks.BlockDiagonalMask
    mask = kind.from_seqlens(q_lengths, k_lengths)
    of_query = [(s, i) for s, length in enumerate(q_lengths) for i in range(length)]
    of_key = [(s, j) for s, length in enumerate(k_lengths) for j in range(length)]

    def rule(row, column):
        (s, i), (t, j) = of_query[row], of_key[column]
        offset = j - (i + k_lengths[s] - q_lengths[s])
        inside = window is None or (offset <= window[1] and (window[0] == -1 or -window[0] <= offset))
        return s == t and inside and (not causal or j <= i)

    M, N = sum(q_lengths), sum(k_lengths)
    assert torch.equal(seen(mask, M, N, window), in_words(M, N, rule))


def test_materialize_adds_bias():
    bias = torch.randn(3, 1, 5)
    mask = masks.LowerTriangularMask().add_bias(bias)
    assert isinstance(mask, masks.LowerTriangularMaskWithTensorBias)
    dense = mask.materialize((2, 3, 4, 5))
    expected = bias.expand(2, 3, 4, 5).masked_fill(torch.ones(4, 5).tril() == 0, -torch.inf)
    assert torch.equal(dense, expected)
    hidden = torch.tensor([True, False, True, True, True])
    other = masks.LocalAttentionFromBottomRightMask(1, 1).add_bias(hidden)
    assert (other.materialize((4, 5))[:, 1] == -torch.inf).all()
    assert other.bias is hidden
    with pytest.raises(ValueError, match=r"has a bias already; add .* With padding"):
        mask.add_bias(bias)


def test_add_bias_leaves_mask():
    mask = masks.BlockDiagonalMask.from_seqlens([2, 3])
    other = mask.add_bias(torch.zeros(5))
    assert mask.bias is None
    assert other.q_starts == mask.q_starts
    causal = mask.make_causal()
    assert type(causal) is masks.BlockDiagonalCausalMask
    assert type(mask) is masks.BlockDiagonalMask


def test_tensor_lists_round_trip():
    tensors = [torch.randn(2, 3, 4, 5), torch.randn(1, 7, 4, 5), torch.randn(3, 1, 4, 5)]
    mask, flat = masks.BlockDiagonalMask.from_tensor_list(tensors)
    assert flat.shape == (1, 16, 4, 5)
    assert mask.q_starts == (0, 3, 6, 13, 14, 15, 16)
    for tensor, part in zip(tensors, mask.split(flat)):
        assert torch.equal(tensor, part)
    with pytest.raises(ValueError, match=r"tensor must have shape \[1, 16, ...\]"):
        mask.split(flat[:, 1:])


@pytest.mark.parametrize("end", [(4, 0), (0, 5), (4, 5)])
def test_tensor_lists_without_features_heads_or_sequences(end):
    tensors = [torch.randn(2, 3, *end), torch.randn(0, 7, *end), torch.randn(3, 0, *end)]
    mask, flat = masks.BlockDiagonalMask.from_tensor_list(tensors)
    assert flat.shape == (1, 6, *end)
    assert mask.q_starts == (0, 3, 6, 6, 6, 6)
    out = lowtide.memory_efficient_attention(flat, flat, flat, mask)
    assert [part.shape for part in mask.split(out)] == [(2, 3, *end), (0, 0, *end), (3, 0, *end)]


def test_batches_set_as_code_for_xformers_does():
    """DINOv2 makes the mask of lengths, and says afterwards which of them were one tensor."""
    tensors = [torch.randn(2, 3, 4), torch.randn(1, 7, 4)]
    mask = masks.BlockDiagonalMask.from_seqlens([3, 3, 7])
    flat = torch.cat([tensor.reshape(1, -1, 4) for tensor in tensors], 1)
    assert [part.shape[0] for part in mask.split(flat)] == [1, 1, 1]
    mask._batch_sizes = [2, 1]
    for each in (mask, mask.make_causal()):
        for tensor, part in zip(tensors, each.split(flat), strict=True):
            assert torch.equal(tensor, part)


@pytest.mark.parametrize("kind", [masks.BlockDiagonalMask, masks.BlockDiagonalCausalMask])
def test_several_sequences_match_loop(device, kind):
    tensors = [torch.randn(1, length, 2, 8, device=device, requires_grad=True) for length in (5, 600, 1, 77)]
    upstream = [torch.randn_like(tensor) for tensor in tensors]
    mask, flat = kind.from_tensor_list(tensors)
    outs = mask.split(lowtide.memory_efficient_attention(flat, flat, flat, mask, backend="torch"))
    own = masks.LowerTriangularMask() if kind is masks.BlockDiagonalCausalMask else None
    loop = [lowtide.memory_efficient_attention(x, x, x, own, backend="torch") for x in tensors]
    for found, expected in ((outs, loop), *[
        [torch.autograd.grad(each, tensors, upstream) for each in (outs, loop)]
    ]):  # fmt: skip
        for got, want in zip(found, expected):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("make", [lambda: masks.BlockDiagonalMask.from_seqlens([2, -1]),
    lambda: masks.BlockDiagonalMask.from_seqlens([2, 1], [3])])  # fmt: skip
def test_lengths_mismatched(make):
    with pytest.raises(ValueError, match="q_seqlen"):
        make()


@pytest.mark.parametrize("lengths", [torch.tensor([2, 1]), [2.0, 1.0], 3])
def test_lengths_of_another_type(lengths):
    with pytest.raises((ValueError, TypeError), match=r"list of ints .*tolist\(\), of cu_seqlens"):
        masks.BlockDiagonalMask.from_seqlens(lengths)


def test_names():
    assert set(masks.__all__) == {
        "AttentionBias",
        "BlockDiagonalCausalMask",
        "BlockDiagonalMask",
        "LocalAttentionFromBottomRightMask",
        "LowerTriangularFromBottomRightMask",
        "LowerTriangularMask",
        "LowerTriangularMaskWithTensorBias",
    }
    assert repr(masks.LowerTriangularMask()) == "LowerTriangularMask()"
    assert repr(masks.LocalAttentionFromBottomRightMask(3, -1)) == (
        "LocalAttentionFromBottomRightMask(window_left=3, window_right=None)"
    )


MADE_FOR_5 = {name: mask for name, (mask, _) in RULES.items()} | {
    "BlockDiagonalMask": masks.BlockDiagonalMask.from_seqlens([2, 3]),
    "BlockDiagonalCausalMask": masks.BlockDiagonalMask.from_seqlens([2, 3]).make_causal(),
    "with a bool bias": masks.LowerTriangularMask().add_bias(torch.rand(5, 5) < 0.7),
}


@pytest.mark.parametrize("name", MADE_FOR_5)
def test_materialized_as_bool(name):
    """True takes part, as in every bool mask that attention takes."""
    mask, q = MADE_FOR_5[name], torch.randn(1, 5, 1, 4)
    shown = mask.materialize((1, 1, 5, 5), torch.bool)
    assert torch.equal(shown, mask.materialize((1, 1, 5, 5)) == 0)
    found = lowtide.memory_efficient_attention(q, q, q, shown)
    torch.testing.assert_close(found, lowtide.memory_efficient_attention(q, q, q, mask))


@pytest.mark.parametrize(
    ("mask", "shape", "dtype", "message"),
    [
        (masks.LowerTriangularMask(), (3, 3), torch.int64, "dtype must be floating-point"),
        (masks.LowerTriangularMask().add_bias(torch.zeros(3, 3)), (3, 3), torch.bool, "dtype must be"),
        (masks.LowerTriangularMask(), (3,), torch.float32, "shape must end with the numbers"),
        (masks.BlockDiagonalMask.from_seqlens([1, 2]), (2, 2), torch.float32, "made for 3 queries"),
        (masks.BlockDiagonalMask.from_seqlens([1, 2]), (4, 4), torch.float32, "made for 3 queries"),
    ],
)
def test_refused_to_materialize(mask, shape, dtype, message):
    with pytest.raises((ValueError, TypeError), match=message):
        mask.materialize(shape, dtype)


@pytest.mark.parametrize("tensors", [[], [torch.zeros(3)], [torch.zeros(1, 2, 3), torch.zeros(1, 2, 4)]])
def test_refused_tensor_list(tensors):
    with pytest.raises(ValueError, match=r"tensors must be one or more \[B_i, M_i, \.\.\.\]"):
        masks.BlockDiagonalMask.from_tensor_list(tensors)


class Local(masks.LowerTriangularMask):
    band = window_band((2, 0))


class Sequences(masks.LowerTriangularMask):
    def blocks(self, device):
        return 2 * (torch.tensor([0, 2, 5], dtype=torch.int32, device=device),)


@pytest.mark.parametrize("kind", [Local, Sequences])
def test_subclass_of_a_causal_mask_is_not_causal_alone(kind):
    """torch's kernels would see all keys before a query."""
    x = torch.randn(3, 1, 5, 1, 4)
    found = lowtide.memory_efficient_attention(*x, kind())
    torch.testing.assert_close(found, lowtide.memory_efficient_attention(*x, kind(), backend="reference"))
    assert not definition.is_plain_causal(kind(), 5, 5)
    assert definition.is_plain_causal(masks.LowerTriangularMask(), 5, 5)
