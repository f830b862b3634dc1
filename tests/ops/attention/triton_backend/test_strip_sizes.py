"""Backward divides its scores into strips that cover all of them, in bounded memory.

Shapes: B batches, M queries, N keys, H query heads, G key heads, K features of queries and keys, E
of values.
"""

import itertools

import pytest
import torch

pytest.importorskip("triton")

from lowtide.ops.attention.definition.operands import AttentionOptions, AttentionSizes, Operands
from lowtide.ops.attention.triton_backend.launch import kernel_call
from lowtide.ops.attention.triton_backend.launch_backward import _leaves_idle
from lowtide.ops.attention.triton_backend.strips import ROOM, Stored, Strip, strips, up


def bytes_of(strip, size, score_bytes, pieces):
    """Bytes of a strip: stored scores, pieces of operands, and in half precision a sum of dq."""
    _, H, G, M, N, K, E = size
    heads = strip.groups * strip.batches * H // G
    operands = 2 * pieces * (heads * M + strip.groups * strip.batches * N) * (up(K, 16) + up(E, 16))
    query_sum = 4 * heads * M * K if strip.keys < N and not pieces else 0
    return torch.Size(strip.shape(size)).numel() * score_bytes + operands + query_sum


@pytest.mark.parametrize("pieces", [0, 2, 3])
@pytest.mark.parametrize("shared_batches", [False, True])
@pytest.mark.parametrize("shared_heads", [False, True])
@pytest.mark.parametrize("M", [1, 2000, 100_000])
def test_strips_cover_scores_in_bounded_memory(monkeypatch, pieces, shared_heads, shared_batches, M):
    monkeypatch.setattr("lowtide.ops.attention.triton_backend.strips.SHARE", 1e6)
    score_bytes = 4 if pieces else 2
    for B, H, G, N in (
        (1, 16, 16, 4096),
        (4, 16, 4, 2048),
        (3, 7, 1, 5),
        (2, 12, 6, 70_001),
        (32, 16, 2, 999),
    ):
        size = AttentionSizes(B, H, G, M, N, 64, 60)
        found = strips(size, score_bytes, pieces, shared_batches, shared_heads)
        places = [corner for strip in found for corner in strip_corners(strip)]
        assert len(places) == len(set(places)) == B * G * -(-N // 128)
        of_all = Strip(0, B if shared_batches else 1, 0, G if shared_heads else 1, 0, min(N, 128))
        together = not pieces or bytes_of(of_all, size, score_bytes, pieces) <= ROOM
        fewest = of_all if together else Strip(0, 1, 0, 1, 0, min(N, 128))
        for strip in found:
            assert not (shared_heads and together) or strip.groups == G
            assert not (shared_batches and together) or strip.batches == B
            assert strip.first_key % 128 == 0
            room = max(ROOM, bytes_of(fewest, size, score_bytes, pieces))
            assert bytes_of(strip, size, score_bytes, pieces) <= room


@pytest.mark.parametrize("pieces", [0, 2, 3])
def test_strip_share_of_dense(pieces):
    """Dense holds three matrices of scores. A strip has a tenth of them, or more of a small one."""
    itemsize = 4 if pieces else 2
    shapes = ((1, 2, 2, 4096, 64), (2, 8, 2, 1000, 64), (1, 16, 16, 4096, 64), (1, 1, 1, 300, 64))
    for B, H, G, M, K in (*shapes, (1, 16, 16, 4096, 512), (8, 4, 4, 4096, 256)):
        size = AttentionSizes(B, H, G, M, M, K, K)
        score_bytes = 2 * itemsize if {0: 256}.get(pieces, 128) < K else itemsize
        for shared in (False, True):  # a bias, by batches and heads
            fewest = Strip(0, 1, 0, G if shared and not pieces else 1, 0, min(M, 128))
            fewest = bytes_of(fewest, size, score_bytes, pieces)
            for strip in strips(size, score_bytes, pieces, shared and pieces > 0, shared):
                held, scores = bytes_of(strip, size, score_bytes, pieces), itemsize * B * H * M * M
                small = 0.75 * scores + 0.25 * itemsize * B * (H + G) * M * 2 * K
                small = min(64 << 20, small) if scores <= 96 << 20 else 0
                assert held <= max(fewest, 0.3 * scores, 16 << 20, small)


MIB = 1 << 20
OF_FEW_PROBLEMS = {
    # B, H, G, M, N, K; bytes of a score; pieces; if heads share the bias: strips
    "bias [1, 1, M, N], float32": ((6, 32, 16, 300, 300, 128), 8, 3, True, 8),
    "bias [B, 1, M, N], float32": ((3, 8, 4, 197, 197, 192), 8, 3, True, 3),
    "bias [1, H, M, N], float32": ((7, 4, 4, 512, 49, 48), 4, 3, False, 1),
    "bfloat16, K 512": ((2, 1, 1, 4096, 4096, 512), 4, 0, False, 4),
}


@pytest.mark.parametrize("name", OF_FEW_PROBLEMS)
def test_few_strips_of_few_problems(name):
    (B, H, G, M, N, K), score_bytes, pieces, shared_heads, times = OF_FEW_PROBLEMS[name]
    size = AttentionSizes(B, H, G, M, N, K, K)
    found = strips(size, score_bytes, pieces, name.startswith("bias [1"), shared_heads)
    assert len(found) == times


OF_A_CARD = {
    # B, H, G, M, K; bytes of what is kept of a score; pieces: key heads, keys and strips, MiB of a
    # strip's scores and of its pieces
    "bias [1, H, M, M], bfloat16": ((4, 16, 16, 2048, 64), 2, 0, (4, 2048, 4), (128, 0)),
    "bias [1, H, M, M], float32": ((4, 16, 16, 2048, 64), 4, 3, (4, 2048, 4), (256, 48)),
    "float32, K 64": ((1, 16, 16, 4096, 64), 4, 3, (4, 4096, 4), (256, 24)),
    "float32, K 128": ((1, 16, 16, 4096, 128), 4, 3, (4, 4096, 4), (256, 48)),
    "TF32 allowed, K 128": ((1, 16, 16, 4096, 128), 4, 2, (4, 4096, 4), (256, 32)),
    "bfloat16, K 512": ((1, 16, 4, 4096, 512), 4, 0, (1, 1024, 16), (64, 0)),
    "bfloat16, K 512, longer": ((1, 16, 4, 8192, 512), 4, 0, (1, 1024, 32), (128, 0)),
}


@pytest.mark.parametrize("name", OF_A_CARD)
def test_strips_of_benchmark_cases(name):
    """Less than 300 MB for a bias of all scores in half precision, statistics included, 8 % more in
    float32; and enough programs each for a card."""
    (B, H, G, M, K), score_bytes, pieces, (groups, keys, times), mib = OF_A_CARD[name]
    size = AttentionSizes(B, H, G, M, M, K, K)
    found = strips(size, score_bytes, pieces, shared_batches="bias" in name)
    assert {(strip.groups, strip.keys) for strip in found} == {(groups, keys)}
    assert len(found) == times
    rows = B * groups * M * (H // G + 1)
    held = torch.Size(found[0].shape(size)).numel() * score_bytes, 2 * pieces * rows * 2 * K
    assert held == (mib[0] * MIB, mib[1] * MIB)
    if "bias" in name:
        assert sum(held) + 3 * 4 * B * H * M < (324e6 if pieces else 300e6)


def strip_corners(strip):
    """The batch, key head and first key of each 128 keys of a strip."""
    return itertools.product(
        range(strip.first_batch, strip.first_batch + strip.batches),
        range(strip.first_group, strip.first_group + strip.groups),
        range(strip.first_key, strip.first_key + strip.keys, 128),
    )


@pytest.mark.parametrize(("pieces", "idle"), [(1, False), (2, False), (3, True)])
def test_strips_that_leave_idle(pieces, idle):
    """Strips of 128 programs: with three pieces scores are recomputed (decisions 0061 and 0104)."""
    query = torch.empty(1, 1, 1, 1).expand(1, 16, 8192, 64)
    call = kernel_call(Operands(query, query, query), AttentionOptions(0.125))._replace(pieces=pieces)
    assert _leaves_idle(call, Stored(grad_scores=True)) is idle
