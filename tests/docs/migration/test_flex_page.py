"""The page says that FlexAttention computes the same: it does. (It has no gradients on the CPU.)

Shapes: B batches, H heads, M queries and keys, K features.
"""

import pytest
import torch

from lowtide import (
    attn_bias,
    memory_efficient_attention,
    memory_efficient_attention_with_lse,
    scaled_dot_product_attention,
)

flex = pytest.importorskip("torch.nn.attention.flex_attention")
pytestmark = pytest.mark.filterwarnings("ignore")  # Outside of torch.compile it says that it is slow.

B, H, M, K = 2, 4, 128, 16
place = torch.arange(M)
distance_MM = place - place[:, None]
slope_H = 2.0 ** -torch.arange(1, H + 1)
CAUSAL = attn_bias.LowerTriangularMask()


def scores(score_mod):
    return lambda q, k, v: flex.flex_attention(q, k, v, score_mod=score_mod)


def visible(mask_mod):
    def attention(q, k, v):
        mask = flex.create_block_mask(mask_mod, None, None, M, M, device="cpu")
        return flex.flex_attention(q, k, v, block_mask=mask)

    return attention


def ours(*arguments, **options):
    def attention(q, k, v):
        turned = (each.transpose(1, 2) for each in (q, k, v))
        return memory_efficient_attention(*turned, *arguments, **options).transpose(1, 2)

    return attention


CASES = {
    "ALiBi": (
        scores(lambda s, b, h, i, j: s + slope_H[h] * (j - i)),
        ours((slope_H[:, None, None] * distance_MM)[None]),
    ),
    "causal": (visible(lambda b, h, i, j: i >= j), ours(CAUSAL)),
    "window": (visible(lambda b, h, i, j: (i - j >= 0) & (i - j <= 32)), ours(window=(32, 0))),
    "soft cap": (scores(lambda s, b, h, i, j: 5 * torch.tanh(s / 5)), ours(softcap=5.0)),
    "factor": (scores(lambda s, b, h, i, j: s * 0.5), ours(scale=0.5 * K**-0.5)),
    "rule": (
        visible(lambda b, h, i, j: i // 16 == j // 16),
        ours((place[:, None] // 16 == place // 16)[None, None]),
    ),
}


@pytest.fixture
def tensors():
    return torch.randn(3, B, H, M, K)


@pytest.mark.parametrize("name", CASES)
def test_function_of_a_score(tensors, name):
    theirs, mine = (attention(*tensors) for attention in CASES[name])
    torch.testing.assert_close(mine, theirs)


def test_learned_table(tensors):
    table = torch.randn(2 * M - 1)
    theirs = flex.flex_attention(*tensors, score_mod=lambda s, b, h, i, j: s + table[j - i + M - 1])
    bias_MM = table[distance_MM + M - 1]
    torch.testing.assert_close(scaled_dot_product_attention(*tensors, attn_mask=bias_MM[None, None]), theirs)


def test_logsumexp_and_grouped_heads(tensors):
    q, k, v = tensors
    _, lse = flex.flex_attention(q, k, v, return_lse=True)
    turned = (each.transpose(1, 2) for each in (q, k, v))
    torch.testing.assert_close(memory_efficient_attention_with_lse(*turned)[1], lse)
    grouped = q, k[:, :2], v[:, :2]
    theirs = flex.flex_attention(*grouped, enable_gqa=True)
    torch.testing.assert_close(scaled_dot_product_attention(*grouped, enable_gqa=True), theirs)
