"""Sizes of tiles: bounded in scores and in operands, and small beside all scores."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.ops.attention.definition.operands import AttentionSizes
from lowtide.ops.attention.torch_backend.tiling import PART, SIDE, TILE, tile_shape

LONG = st.sampled_from([1, 7, 77, 512, 1025, 65536, 1 << 20])
FEATURES = st.sampled_from([1, 8, 64, 80, 512])


@given(
    B=st.integers(1, 64), G=st.integers(1, 16), R=st.integers(1, 8), M=LONG, N=LONG, K=FEATURES, E=FEATURES
)
def test_tile_is_bounded(B, G, R, M, N, K, E):
    shape = tile_shape(AttentionSizes(B, G * R, G, M, N, K, E))
    rows = shape.rows * R
    of_scores = shape.heads * rows * shape.columns
    assert of_scores <= min(TILE, max(SIDE * SIDE, B * G * R * M * N / PART))
    assert shape.heads * max(rows, shape.columns) * max(K, E) <= TILE


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((2, 8, 8, 512, 512, 64, 64), (1, 512, 512)),
        ((32, 12, 12, 512, 512, 64, 64), (4, 512, 512)),
        ((64, 4, 4, 49, 49, 32, 32), (109, 49, 49)),
        ((1, 8, 8, 1, 65536, 64, 64), (1, 1, 16384)),
        ((4, 8, 8, 1, 2048, 64, 64), (8, 1, 2048)),
    ],
    ids=["square", "heads together", "windows", "decoding", "decoding, several heads"],
)
def test_tile_shape(sizes, expected):
    assert tile_shape(AttentionSizes(*sizes)) == expected
