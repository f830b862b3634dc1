"""The sizes of tiles: one for any features, and none narrower than ptxas has right."""

import pytest
import torch

pytest.importorskip("triton")

from lowtide.ops.attention.definition.operands import AttentionOptions, Operands
from lowtide.ops.attention.operator.autograd import with_gradients
from lowtide.ops.attention.triton_backend import launch_small_problems
from lowtide.ops.attention.triton_backend.launch import kernel_call
from lowtide.ops.attention.triton_backend.tile_sizes import (
    FEWEST_PROBLEMS,
    LARGE,
    are_many_small,
    find_tile,
)


def kernels_of(half):
    """Each with a number of pieces."""
    names = ("forward", "key and value", "value", "scores", "query of scores", "key and value of scores")
    found = [(name, count) for name in names for count in ((1,) if half else (2, 3))]
    return [*found, ("query", 1), ("bias of scores", 1), *((("key", 1),) if half else ())]


@pytest.mark.parametrize("shared_memory", [99 << 10, 163 << 10, LARGE])
@pytest.mark.parametrize("half", [True, False])
def test_tile_for_any_features(half, shared_memory):
    for K in (1, 8, 16, 24, 31, 32, 40, 64, 65, 128, 130, 256, 300, 512, 600, 5000):
        for E in (1, 24, 40, 128, 1000):
            found = {each: find_tile(*each, half, K, E, shared_memory) for each in kernels_of(half)}
            absent = {each for each, tile in found.items() if tile is None}
            if max(K, E) > (256 if half else 128):  # backward stores the weights too
                recomputing = "query", "key and value", "key", "value"
                assert absent == {each for each in found if each[0] in recomputing}
            else:
                assert {name for name, _ in absent} <= {"key and value", "value"}
                assert not absent & {("value", count) for name, count in absent if name == "key and value"}
            for (name, _), tile in found.items():
                if tile is None:
                    continue
                narrow = name in ("forward", "query", "key and value") and max(K, E) <= 32
                assert tile.K == tile.E == 32 if narrow else min(tile.K, tile.E) >= 64
                assert tile.K * tile.blocks_K >= K > tile.K * (tile.blocks_K - 1)
                assert tile.cut_K == (K % tile.K > 0)
                assert tile.E * tile.blocks_E >= E > tile.E * (tile.blocks_E - 1)
                assert tile.cut_E == (E % tile.E > 0)


@pytest.mark.parametrize("shared_memory", [99 << 10, 163 << 10, LARGE])
@pytest.mark.parametrize("half", [True, False])
def test_tiles_within_strip(half, shared_memory):
    """KEYS of strips.py; and operands.py, is_far."""
    for K in (1, 64, 128, 256, 512, 5000):
        found = (find_tile(*each, half, K, K, shared_memory) for each in kernels_of(half))
        for size in filter(None, found):
            assert 128 % size.N == 0
            assert size.M <= 128


@pytest.mark.parametrize("sizes", [(64, 64, 64, 64), (1, 64, 8, 40), (17, 3, 32, 32)])
def test_many_small_problems_keep_no_low_half(sizes):
    """Forward and backward are one tile, in which backward sums over scores."""
    M, N, K, E = sizes
    x = torch.empty(1, 1, 1, 1, dtype=torch.bfloat16).expand
    for many, B in ((True, FEWEST_PROBLEMS // 4), (False, FEWEST_PROBLEMS // 4 - 1)):
        query, key, value = x(B, 4, M, K), x(B, 4, N, K), x(B, 4, N, E)
        operands = Operands(*(each.contiguous().requires_grad_() for each in (query, key, value)))
        options, _ = with_gradients(operands, AttentionOptions(1.0, backend="triton"))
        assert options.keep_low is not many
        call = kernel_call(operands, options)
        assert are_many_small(call.size) is many
        for kernel in ("problem forward", "problem gradient"):
            assert launch_small_problems.is_small(call, kernel) is many
    for room in (99 << 10, 163 << 10, LARGE):
        for kernel in ("problem forward", "problem gradient"):
            tile = find_tile(kernel, 1, True, K, E, room)
            assert tile.M >= M
            assert tile.N >= N
    shared = x(B, 2, N, K).contiguous()
    assert not are_many_small(kernel_call(operands._replace(key=shared, value=shared), options).size)


BIASES = [(1, 4, 9, 7), (66, 4, 9, 7), (1, 1, 9, 7), (66, 1, 9, 7), (1, 4, 1, 7), (1, 4, 9, 1)]


@pytest.mark.parametrize("shape", BIASES)
@pytest.mark.parametrize("grad_bias", [True, False])
def test_low_half_is_kept_where_it_is_read(shape, grad_bias):
    made = (torch.empty(66, 4, rows, 8, dtype=torch.bfloat16) for rows in (9, 7, 7))
    query, key, value = (each.requires_grad_() for each in made)
    bias = torch.empty(shape, dtype=torch.bfloat16, requires_grad=grad_bias)
    operands = Operands(query, key, value, bias)
    options, _ = with_gradients(operands, AttentionOptions(1.0, backend="triton"))
    call = kernel_call(operands, options)
    assert options.keep_low is not launch_small_problems.is_small(call, "problem gradient", grad_bias)
