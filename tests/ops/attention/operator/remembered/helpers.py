"""Calls of the Triton kernels, made twice.

Shapes: B batches, M queries and keys, H heads, K features.
"""

import torch

import lowtide
from lowtide import attn_bias as masks
from tests.ops.attention.helpers import check, differentiate, make_case, make_upstream, ours

B, M, H, K = 2, 12, 2, 16
CAUSAL = masks.LowerTriangularMask()


def case_of(device, **more):
    return make_case(**({"B": B, "M": M, "N": M, "H": H, "K": K} | more), device=device)


def least_of(device):
    """The quickest call, for tests that ask only whether a call is recorded."""
    return case_of(device, B=1, H=1)


def results(case, upstream, **options):
    return differentiate(ours, case, upstream, backend="triton", **options)


def check_twice(case):
    """Compare a call with float64, and a second one that is alike with the first, bit for bit."""
    upstream = make_upstream(case)
    first = results(case, upstream)
    check(first, case, upstream)
    second = results(case, upstream)
    assert first.keys() == second.keys()
    for name, expected in first.items():
        assert torch.equal(second[name], expected), name
        assert second[name].stride() == expected.stride(), name


CASES = {
    "plain": {},
    "causal": {"mask": CAUSAL},
    "local": {"mask": masks.LocalAttentionFromBottomRightMask(3, 2)},
    "window": {"window": (3, 2)},
    "soft cap": {"softcap": 2.0},
    "scale": {"scale": 0.3},
    "bias": {"bias": (0, 1, 1, 1)},
    "bias of keys": {"bias": (1, 1, 0, 1)},
    "bias of queries": {"bias": (1, 1, 1, 0)},
    "causal with a bias": {"mask": CAUSAL, "bias": (0, 1, 1, 1)},
    "several tiles": {"M": 70, "N": 90, "bias": (0, 1, 1, 1)},
    "shared key heads": {"H": 4, "G": 2},
    "odd features": {"K": 5, "E": 7},
    "half precision": {"dtype": torch.bfloat16, "bias": (0, 1, 1, 1)},
    "float16": {"dtype": torch.float16, "M": 70},
    "many features": {"dtype": torch.bfloat16, "K": 264},
}


# `make test` has each option but a few in the test of like calls, or in that of what tells apart.
TOLD_APART = ("causal", "window", "soft cap", "scale", "bias", "half precision")
KEPT = (
    *("plain", "local", "bias of keys", "bias of queries", "causal with a bias", "odd features", "float16"),
    "shared key heads",
)


def changed(case, name, change):
    leaf = getattr(case, name)
    return type(case)(
        **{
            each: change(leaf) if each == name else getattr(case, each)
            for each in ("query", "key", "value", "bias", "mask", "options")
        }
    )


def shifted(leaf):
    """The same numbers and strides, one element later in memory."""
    wider = torch.empty(leaf.numel() + 1, dtype=leaf.dtype, device=leaf.device)
    return wider[1:].view(leaf.shape).copy_(leaf.detach()).requires_grad_()


def attention_of(case, **options):
    given = case.query, case.key, case.value, case.attn_bias
    return lowtide.memory_efficient_attention(*given, backend="triton", **options)


def repeated(case, **options):
    for _ in range(2):
        attention_of(case, **options).sum().backward()
