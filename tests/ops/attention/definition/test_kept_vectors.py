"""What a call computes of a mask is kept for later calls, and for no others.

Shapes: M queries, N keys.
"""

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
