"""What a call that does not fit is told: the argument, what was expected, what came."""

import copy
import pickle
import re

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import lowtide
from lowtide import attn_bias as masks

Q, KV = torch.zeros(2, 5, 4, 8), torch.zeros(2, 7, 2, 8)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query": [1]}, TypeError, "query must be a torch.Tensor, got list"),
        ({"query": Q[0, 0]}, ValueError, r"query must have shape \[B, M, K\], .*got \[4, 8\]"),
        ({"key": KV[0]}, ValueError, r"key must have query's 4 dimensions, got \[7, 2, 8\]"),
        ({"key": KV[:1]}, ValueError, "the same number of batches, got 2, 1 and 2"),
        ({"key": KV[..., :3]}, ValueError, "key must have query's 8 features, got 3"),
        ({"value": KV[:, :3]}, ValueError, r"value must have as many heads and keys as key \(2 and 7\)"),
        ({"query": Q[:, :, :3]}, ValueError, "query's heads must be a multiple of key's, got 3 and 2"),
        ({"query": Q[..., :0]}, ValueError, "key must have query's 0 features, got 8"),
        (
            {"key": KV.double()},
            TypeError,
            "key must have query's dtype .*32.*, got torch.float64; cast it",
        ),
        ({"query": Q.int(), "key": KV.int(), "value": KV.int()}, TypeError, "query must be float32"),
        ({"query": Q.to("meta")}, ValueError, "query must have data, got a tensor on meta"),
        ({"value": KV.to("meta")}, ValueError, r"value must be on query's device \(cpu\), got meta"),
        ({"attn_bias": "causal"}, TypeError, "a mask of lowtide.attn_bias or None, got str"),
        ({"attn_bias": [KV, KV]}, TypeError, "got list; add them into one tensor, .* With padding"),
        ({"attn_bias": masks.LowerTriangularMask}, TypeError, r"make one: LowerTriangularMask\(\)$"),
        (
            {"attn_bias": masks.LocalAttentionFromBottomRightMask},
            TypeError,
            r"make one: LocalAttentionFromBottomRightMask\(window_left, window_right\)$",
        ),
        ({"attn_bias": int}, TypeError, r"a mask of lowtide.attn_bias or None, got type$"),
        (
            {"attn_bias": create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device="cpu")},
            TypeError,
            "got BlockMask; call torch's flex_attention with it, or pass what it shows",
        ),
        (
            {"attn_bias": torch.zeros(3, 7)},
            ValueError,
            r"attn_bias must broadcast to 2 batches, 4 heads",
        ),
        (
            {"attn_bias": torch.zeros(1, 1, 1, 1, 7)},
            ValueError,
            r"attn_bias must broadcast to \[B, H, M, N\]",
        ),
        ({"attn_bias": torch.zeros(5, 7).long()}, TypeError, "attn_bias must be bool .* got torch.int64"),
        (
            {"attn_bias": masks.BlockDiagonalMask.from_seqlens([5])},
            ValueError,
            "for 5 queries and 5 keys",
        ),
        (
            {"attn_bias": masks.BlockDiagonalMask.from_seqlens([5], [7])},
            ValueError,
            "batch of one for a mask of several sequences, got 2",
        ),
        ({"p": 1.5}, ValueError, r"p must be in \[0, 1\], got 1.5"),
        ({"p": float("nan")}, ValueError, r"p must be in \[0, 1\], got nan"),
        ({"p": torch.tensor(0.1)}, TypeError, "p must be a float, got a tensor"),
        ({"scale": float("inf")}, ValueError, "scale must be finite, got inf"),
        ({"scale": torch.ones(())}, TypeError, "scale must be a float, got a tensor; multiply query"),
        ({"scale": 10**400}, ValueError, "scale must be a number that a float can hold, got one of"),
        ({"softcap": 10**400}, ValueError, "softcap must be a number that a float can hold"),
        ({"p": True}, TypeError, "p must be a float, got True"),
        ({"softcap": 0.0}, ValueError, "softcap must be a finite number above 0, or None"),
        ({"window": 3}, TypeError, r"window must be \(left, right\) or None, got 3"),
        ({"window": (-2, 0)}, ValueError, "window must be two ints of at least 0"),
        ({"seed": 1.5}, TypeError, "seed must be an int"),
        ({"seed": 1 << 63}, ValueError, "seed must be a 64-bit integer"),
        ({"seed": torch.zeros(2)}, ValueError, r"seed must be an int or a 0-d int64 tensor, got \[2\]"),
        ({"seed": 1, "generator": torch.Generator()}, ValueError, "cannot both be given"),
        ({"generator": 3}, TypeError, "generator must be a torch.Generator, got int"),
        ({"backend": "fast"}, ValueError, "backend must be one of 'auto', .*, got 'fast'"),
        (
            {"backend": "sdpa", "softcap": 1.0},
            ValueError,
            "cannot run this call: it takes no soft cap",
        ),
        (
            {"backend": "sdpa", "window": (1, 1)},
            ValueError,
            "cannot run this call: it takes no window",
        ),
    ],
)
def test_errors(change, error, message):
    arguments = {"query": Q, "key": KV, "value": KV} | change
    with pytest.raises(error, match=message) as caught:
        lowtide.memory_efficient_attention(**arguments)
    assert isinstance(caught.value, RuntimeError), "which is what torch raises"


def test_numbers_of_numpy():
    """They are taken like Python's, here as in the loss."""
    query, key, value = (torch.randn(1, 5, 2, 8) for _ in range(3))
    expected = lowtide.memory_efficient_attention(query, key, value, None, 0.5, 0.25, softcap=2.0, seed=1)
    numbers = {"p": np.float32(0.5), "scale": np.float32(0.25), "softcap": np.float32(2)}
    assert torch.equal(lowtide.memory_efficient_attention(query, key, value, seed=1, **numbers), expected)
    numbers = {"dropout_p": np.float32(0.5), "scale": np.float32(0.25)}
    outs = []
    for options in ({"dropout_p": 0.5, "scale": 0.25}, numbers):
        torch.manual_seed(0)
        outs.append(lowtide.scaled_dot_product_attention(query, key, value, **options))
    assert torch.equal(*outs)


BLOCKS = masks.BlockDiagonalMask.from_seqlens([2, 3])
MADE = "pass nothing: a mask goes to the device of the tensors by itself$"
ABSENT = {
    # what code for xformers reads of a mask, and what its error says
    "to": (masks.LowerTriangularMask(), "leave it out: a mask goes to the device of the tensors by itself"),
    "make_local_attention": (
        BLOCKS,
        r"pass a causal mask, and window=\(window_size - 1, 0\) beside it; "
        "each sequence must have as many keys as queries",
    ),
    "make_causal_from_bottomright": (BLOCKS, r"pass window=\(-1, 0\) beside the mask"),
    "from_tensor_lists_qkv": (masks.BlockDiagonalMask, r"call BlockDiagonalMask\.from_seqlens\(.*torch\.cat"),
    "q_seqinfo": (BLOCKS, "read q_starts"),
}


@pytest.mark.parametrize("name", ABSENT)
def test_absent_name_of_xformers(name):
    owner, advised = ABSENT[name]
    kind = owner if isinstance(owner, type) else type(owner)
    assert not hasattr(owner, name)
    with pytest.raises(AttributeError, match=f"^{kind.__name__} has no {name}; {advised}") as caught:
        getattr(owner, name)
    assert isinstance(caught.value, RuntimeError)


def test_absent_name_stays_free():
    class Mask(masks.LowerTriangularMask):
        def to(self, device):
            return device

    mask = masks.LowerTriangularMask()
    mask.q_seqinfo = 3
    assert Mask().to("cpu") == "cpu"
    assert copy.copy(mask).q_seqinfo == pickle.loads(pickle.dumps(mask)).q_seqinfo == 3
    with pytest.raises(AttributeError) as caught:
        _ = mask.of_no_library
    assert not isinstance(caught.value, RuntimeError)


def test_mask_without_arguments():
    for kind in (masks.LowerTriangularMask, masks.LowerTriangularFromBottomRightMask):
        with pytest.raises(TypeError, match=f"keyword argument 'device'; for device {MADE}") as caught:
            kind(device="cpu")
        assert isinstance(caught.value, RuntimeError)
        with pytest.raises(TypeError, match=f"2 were given; {MADE}"):
            kind("cpu")


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        ([(2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8)], {}, "the same number of heads, .* enable_gqa=True"),
        ([(8,), (2, 8), (2, 8)], {}, r"query must have shape \[..., H, L, E\]"),
        ([(2, 4, 5, 8)] * 3, {"attn_mask": torch.zeros(1, 1, 1, 1, 5)}, "^attn_mask must broadcast to 4 dim"),
        ([(2, 4, 5, 8)] * 3, {"attn_mask": torch.zeros(3, 5)}, "^attn_mask must broadcast to 2 batches"),
        (
            [(3, 2, 4, 5, 8)] * 3,
            {"attn_mask": torch.zeros(3, 1, 4, 5, 5)},
            r"must have 1 or \[3, 2\] in its leading dimensions, got \[3, 1\]\. Fold dimension 0",
        ),
        (
            [(3, 2, 4, 5, 8)] * 3,
            {"attn_mask": torch.zeros(2, 1, 5, 5)},
            r"got \[1, 2\]\. Fold dimension 1, .* or call .* each of its 2 places",
        ),
        (
            [(3, 2, 4, 5, 8)] * 3,
            {"attn_mask": torch.zeros(5, 2, 4, 5, 5)},
            r"in its leading dimensions, got \[5, 2\]$",
        ),
        ([(2, 4, 5, 8)] * 3, {"dropout_p": -0.1}, "^dropout_p must be in"),
    ],
)
def test_errors_of_sdpa_signature(shapes, options, message):
    with pytest.raises(ValueError, match=message):
        lowtide.scaled_dot_product_attention(*map(torch.zeros, shapes), **options)


@pytest.mark.parametrize("dim", [0, 1])
def test_advice_for_a_mask_of_some_batches(dim):
    query, key, value = torch.randn(3, 3, 2, 4, 5, 8, dtype=torch.float64)
    sizes = [1, 1, 4, 5, 5]
    sizes[dim] = query.shape[dim]
    attn_mask = torch.randn(sizes, dtype=torch.float64)
    with pytest.raises(ValueError, match="Fold") as caught:
        lowtide.scaled_dot_product_attention(query, key, value, attn_mask)
    fold, unfold = re.search(r"pass x(.*?) for .* result(.*) is the result", str(caught.value)).groups()
    folded = [eval(f"x{fold}", {"x": each}) for each in (query, key, value, attn_mask)]
    found = eval(f"x{unfold}", {"x": lowtide.scaled_dot_product_attention(*folded), "heads": 4})
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("key", "value", "bias", "message"),
    [
        ((2, 7, 3, 1, 8), (2, 7, 3, 1, 8), None, r"key must have shape \[B, N, 2, 1 or 3, ...\]"),
        ((2, 7, 2, 1, 8), (2, 7, 2, 3, 8), None, "the same number of heads in a group, got 1 and 3"),
        ((2, 7, 2, 1, 8), (2, 7, 2, 1, 8), (2, 1, 3, 5, 7), "1, 1 or 2, 3 in the places of G and H"),
    ],
)
def test_errors_of_five_dimensions(key, value, bias, message):
    with pytest.raises(ValueError, match=message):
        lowtide.memory_efficient_attention(
            torch.zeros(2, 5, 2, 3, 8),
            torch.zeros(key),
            torch.zeros(value),
            None if bias is None else torch.zeros(bias),
        )


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("BlockDiagonalCausalLocalAttentionMask", "as many keys as queries"),
        ("BlockDiagonalCausalLocalAttentionFromBottomRightMask", "pass BlockDiagonalMask, and window="),
        ("BlockDiagonalCausalFromBottomRightMask", "pass BlockDiagonalMask, and window=(-1, 0)"),
        ("BlockDiagonalCausalWithOffsetPaddedKeysMask", "inference with a cache"),
        ("LowerTriangleMask", "it has AttentionBias, BlockDiagonalCausalMask,"),
    ],
)
def test_mask_of_another_library(name, advice):
    with pytest.raises(AttributeError, match=re.escape(f"lowtide.attn_bias has no {name}; ")) as caught:
        getattr(masks, name)
    assert advice in str(caught.value)
    assert not hasattr(masks, "__path__")
