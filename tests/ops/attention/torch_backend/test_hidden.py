"""A mask keeps hidden keys from all rows, also if the keys are nan or infinite."""

import pytest
import torch

from lowtide import attn_bias, memory_efficient_attention
from lowtide.ops.attention.torch_backend import tiling

OTHERS = [torch.nan, torch.inf, -torch.inf, 3e38]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("tile", [1 << 20, 64])
def test_hidden_keys_reach_no_earlier_row(monkeypatch, tile, other, dtype):
    """The key of the last token, under a causal mask: all rows but the last are as without it."""
    monkeypatch.setattr(tiling, "TILE", tile)
    monkeypatch.setattr(tiling, "SIDE", 8)
    query, key, value = (torch.randn(2, 21, 3, 8).to(dtype) for _ in range(3))
    causal = attn_bias.LowerTriangularMask()
    expected = memory_efficient_attention(query, key, value, causal, backend="torch")
    key[:, -1] = other
    found = memory_efficient_attention(query, key, value, causal, backend="torch")
    assert torch.equal(found[:, :-1], expected[:, :-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("other", OTHERS)
def test_masked_keys_reach_no_row(other, dtype):
    query, key, value = (torch.randn(2, 9, 3, 8).to(dtype) for _ in range(3))
    shown = torch.rand(2, 1, 1, 9) > 0.4
    shown[..., 0] = True
    expected = memory_efficient_attention(query, key, value, shown, backend="torch")
    key.masked_fill_(~shown.view(2, 9, 1, 1), other)
    found = memory_efficient_attention(query, key, value, shown, backend="torch")
    assert torch.equal(found, expected)
