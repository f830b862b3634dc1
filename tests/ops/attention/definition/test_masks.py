"""Masks against their definitions in words, one score at a time."""

import copy
import pickle

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import lowtide
from lowtide import attn_bias as masks
from lowtide.ops.attention.definition import masks as definition
from lowtide.ops.attention.definition.intervals import MOST_KEPT, VectorCache, visible
from lowtide.ops.attention.definition.masks import intervals, window_band
from tests.support.cards import NEEDS_CUDA

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


@pytest.fixture
def computed(monkeypatch):
    """Hold the arguments of each computation of intervals; bands alone have kept none before."""
    computed, compute = [], definition.of_bands

    def counted(*given):
        computed.append(given)
        return compute(*given)

    monkeypatch.setattr(definition, "of_bands", counted)
    monkeypatch.setattr(definition, "_vectors_of_bands", VectorCache())
    return computed


def test_sequences_keep_intervals(device, computed):
    """Layers share a mask: one computation of its intervals for each window and each causality."""
    mask = masks.BlockDiagonalMask.from_seqlens([5, 0, 7])
    x = torch.randn(1, 12, 2, 8, device=device, requires_grad=True)
    found = {}
    with torch.inference_mode():  # its tensors cannot be saved for backward
        for _ in range(2):
            lowtide.memory_efficient_attention(x, x, x, mask)
    for _ in range(3):
        for own in (mask, mask.make_causal(), mask.add_bias(torch.zeros(12, device=device))):
            for window in (None, (2, 1)):
                out = lowtide.memory_efficient_attention(x, x, x, own, window=window)
                first = found.setdefault((type(own), window), out)
                torch.testing.assert_close(out, first)
                torch.autograd.grad(out.sum(), x)
    assert len(computed) == 5  # once for inference, and four kinds
    for (kind, window), out in found.items():
        fresh = kind((5, 0, 7), (5, 0, 7))
        expected = lowtide.memory_efficient_attention(x, x, x, fresh, window=window, backend="reference")
        torch.testing.assert_close(out, expected)


BANDS = [
    lambda: None,
    masks.LowerTriangularMask,
    masks.LowerTriangularFromBottomRightMask,
    lambda: masks.LocalAttentionFromBottomRightMask(2, 1),
    lambda: masks.LowerTriangularMask().add_bias(torch.ones(12)),
]


@pytest.mark.parametrize("mask", BANDS)
def test_bands_keep_intervals(mask, computed):
    """Each call may make its mask anew, so what bands need is kept apart from them."""
    x = torch.randn(1, 12, 2, 8, requires_grad=True)
    for window in (None, (3, 0), (1, 1)):
        for _ in range(3):
            made = mask()
            out = lowtide.memory_efficient_attention(x, x, x, made, window=window, backend="torch")
            expected = lowtide.memory_efficient_attention(x, x, x, made, window=window, backend="reference")
            torch.testing.assert_close(out, expected)
    assert len(computed) == (2 if made is None else 3)  # one for each mask and window


def test_long_bands_keep_nothing(computed):
    for _ in range(2):
        intervals(masks.LowerTriangularMask(), None, definition.LONGEST_KEPT + 1, 5, torch.device("cpu"))
    assert len(computed) == 2
    assert not definition._vectors_of_bands.known


def test_bands_forget_at_most(computed):
    for N in range(1, 3 * MOST_KEPT):
        first = intervals(masks.LowerTriangularMask(), None, N, N, torch.device("cpu"))
        assert first.end_M.tolist() == [*range(1, N + 1)]
        assert 0 < len(definition._vectors_of_bands.known) <= MOST_KEPT


@pytest.mark.parametrize("right", [True, False])
def test_rows_of_keys_are_the_transpose(right):
    mask = masks.LowerTriangularFromBottomRightMask() if right else masks.LowerTriangularMask()
    for M, N in ((1, 1), (5, 3), (3, 7), (8, 8)):
        for window in (None, window_band((2, 0)), window_band((0, 1))):
            found = intervals(mask, window, M, N, torch.device("cpu"))
            first, end = definition.rows_at(definition.place_of(mask, window, M, N), found, N)
            row = torch.arange(M)
            of_keys = (row >= first[:, None]) & (row < end[:, None])
            assert torch.equal(of_keys.T, visible(found, N))


def attention_of_sequences(mask, x):
    return lowtide.memory_efficient_attention(x, x, x, mask)


def cache_of(mask):
    cache, _ = definition.place_of(mask, None, 5, 5)
    return cache


@pytest.fixture(params=["sequences", "band"])
def mask(request, computed):
    """A mask for 5 queries and keys, which has kept nothing."""
    of_sequences = request.param == "sequences"
    return masks.BlockDiagonalMask.from_seqlens([2, 3]) if of_sequences else masks.LowerTriangularMask()


def test_fake_intervals_are_not_kept(mask):
    x = torch.randn(1, 5, 1, 4)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        intervals(mask, None, 5, 5, mode.from_tensor(x).device)
        lowtide.memory_efficient_attention(*3 * [mode.from_tensor(x)], mask, backend="torch")
    assert not cache_of(mask).known
    lowtide.memory_efficient_attention(x, x, x, mask, backend="torch")
    assert len(cache_of(mask).known) == 1


def test_inference_keeps_its_own(mask):
    """Autograd saves no tensors of inference mode."""
    x = torch.randn(1, 5, 1, 4, requires_grad=True)
    with torch.inference_mode():
        expected = lowtide.memory_efficient_attention(x, x, x, mask, backend="torch")
    out = lowtide.memory_efficient_attention(x, x, x, mask, backend="torch")
    torch.testing.assert_close(out, expected)
    torch.autograd.grad(out.sum(), x)
    assert len(cache_of(mask).known) == 2


def test_transforms_keep_nothing(mask, computed):
    x = torch.randn(5, 1, 4)
    for _ in range(2):
        torch.func.grad(
            lambda x: lowtide.memory_efficient_attention(*3 * [x[None]], mask, backend="torch").sum()
        )(x)
    assert not cache_of(mask).known
    assert computed


@pytest.mark.parametrize("device", [None, "cpu"])
def test_transforms_leave_nothing_in_mask(device):
    """Transforms wrap what is made inside of them, which is of no use when they have ended."""
    mask = masks.BlockDiagonalMask.from_seqlens([1, 2], device=device)
    x = torch.randn(1, 3, 1, 2, dtype=torch.float64)

    def loss(x):
        return attention_of_sequences(mask, x).square().sum()

    first, second = torch.func.hessian(loss)(x), torch.func.hessian(loss)(x)
    assert torch.equal(first, second)
    expected = torch.func.grad(loss)(x)
    torch.testing.assert_close(torch.autograd.grad(loss(x.requires_grad_()), x)[0], expected)


def test_selective_checkpoint_sees_the_same_operators():
    """It counts the operators whose results it saves, in forward and again in backward."""
    mask = masks.BlockDiagonalMask.from_seqlens([2, 3])
    x = torch.randn(1, 5, 1, 4, requires_grad=True)

    def saves(_context, operator, *_given, **_options):
        return operator in (torch.ops.aten.index.Tensor, torch.ops.aten.sub.Tensor)

    def block(x):
        return attention_of_sequences(mask, x)[:, torch.tensor([0, 3])].exp()

    def policy():
        return create_selective_checkpoint_contexts(saves)

    expected = torch.autograd.grad(block(x).square().sum(), x)
    mask = copy.deepcopy(mask)
    found = checkpoint(block, x, use_reentrant=False, context_fn=policy)
    torch.testing.assert_close(torch.autograd.grad(found.square().sum(), x), expected)


def test_pickles_leave_out_what_is_kept():
    mask = masks.BlockDiagonalMask.from_seqlens([2, 3], device="cpu")
    attention_of_sequences(mask, torch.randn(1, 5, 1, 4))
    assert mask.kept_vectors.known
    for other in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert not other.kept_vectors.known
        assert not other._starts
        assert other.q_starts == mask.q_starts
    assert copy.copy(mask).kept_vectors.known is mask.kept_vectors.known


@pytest.mark.gpu
@NEEDS_CUDA
@pytest.mark.parametrize("kind", ["sequences", "band"])
def test_captures_and_streams_keep_their_own(kind, computed):
    mask = masks.LowerTriangularMask()
    if kind == "sequences":
        mask = masks.BlockDiagonalMask.from_seqlens([20, 30], device="cuda")
    cache, _ = definition.place_of(mask, None, 50, 50)
    x = torch.randn(1, 50, 2, 16, device="cuda", dtype=torch.float16)

    def attend():
        return lowtide.memory_efficient_attention(x, x, x, mask, backend="triton")

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        expected = attend()
    torch.cuda.current_stream().wait_stream(side)
    assert len(cache.known) == 1
    assert torch.equal(attend(), expected)
    assert len(cache.known) == 2
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attend()
    graph.replay()
    assert torch.equal(found, expected)
    assert len(cache.known) == 2


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
