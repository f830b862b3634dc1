"""The sizes of tiles: one for any features, and none narrower than ptxas has right."""

import pytest

pytest.importorskip("triton")

from lowtide.attention.blocks import LARGE, blocks, cut

KERNELS = (
    "forward",
    "forward of 2 pieces",
    "forward of 3 pieces",
    "query",
    "key and value",
    "key",
    "value",
    "bias",
)


@pytest.mark.parametrize("shared_memory", [99 << 10, 163 << 10, LARGE])
@pytest.mark.parametrize("half", [True, False])
def test_any_features_have_a_tile(half, shared_memory):
    for K in (1, 8, 16, 24, 31, 32, 40, 64, 65, 128, 130, 256, 300, 512, 600, 5000):
        for E in (1, 24, 40, 128, 1000):
            names = [name for name in KERNELS if "forward" not in name or half == (name == "forward")]
            found = {name: blocks(name, half, max(K, E), shared_memory) for name in names}
            apart = found["key"] is not None and found["value"] is not None
            assert apart or found["key and value"] is not None
            for size in filter(None, found.values()):
                given = cut(K, E, size)
                assert min(given["BLOCK_K"], given["BLOCK_E"]) >= 64
                assert given["BLOCK_K"] * given["BLOCKS_K"] >= K > given["BLOCK_K"] * (given["BLOCKS_K"] - 1)
                assert given["CUT_K"] == (K % given["BLOCK_K"] > 0)
                assert given["BLOCK_E"] * given["BLOCKS_E"] >= E > given["BLOCK_E"] * (given["BLOCKS_E"] - 1)
                assert given["CUT_E"] == (E % given["BLOCK_E"] > 0)
