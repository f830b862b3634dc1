"""Backward of half precision with many features, all of it by way of memory: in one strip, and in
as many as there are key heads and 128 keys. The same truth and budgets as other kernels have.

Shapes: B batches, M queries, N keys, H query heads, G key heads, K features of queries and keys, E
of values.
"""

import pytest
import torch

from lowtide import attn_bias as masks
from lowtide.ops.attention.triton_backend import parts_of_queries, strips
from tests.ops.attention.helpers import (
    INTERPRETED,
    check_same_bits,
    check_triton,
    laid_out,
    make_case,
    peak_of_backward,
)
from tests.support.extended import all_extended_but

pytestmark = INTERPRETED

ROOMS = {"one strip": strips.ROOM, "128 keys": 1}
CASES = {
    "plain": {},
    "several groups": {"B": 2, "M": 9, "N": 20, "H": 6, "G": 3},
    "causal": {"M": 150, "mask": masks.LowerTriangularMask()},
    "more queries than keys": {"M": 260, "N": 131, "mask": masks.LowerTriangularFromBottomRightMask()},
    "local": {"mask": masks.LocalAttentionFromBottomRightMask(3, 2)},
    "sequences": {"mask": masks.BlockDiagonalMask.from_seqlens([3, 130, 7], [1, 2, 147])},
    "sequences without keys": {"mask": masks.BlockDiagonalMask.from_seqlens([129, 9, 2], [0, 0, 150])},
    "causal sequences": {"M": 150, "mask": masks.BlockDiagonalCausalMask.from_seqlens([5, 0, 145])},
    "soft cap and dropout": {"softcap": 2.0, "p": 0.4, "seed": 9},
    "values of fewer features": {"E": 3, "window": (140, 0)},
    "keys of fewer features": {"K": 3, "E": 264},
    "bias of keys": {"bias": (0, 1, 0, 1), "softcap": 3.0, "window": (20, 5), "p": 0.3, "seed": 4},
    "bias of all keys' heads": {"bias": (1, 0, 0, 1)},
    "bias of queries": {"bias": (1, 0, 1, 0)},
    "bias of all scores": {"bias": (0, 1, 1, 1), "mask": masks.LowerTriangularFromBottomRightMask()},
    "bias of all scores and heads": {"bias": (1, 0, 1, 1), "B": 2, "M": 9, "H": 6, "G": 3},
    "bias of all scores, soft cap": {"bias": (0, 1, 1, 1), "softcap": 3.0, "p": 0.3, "seed": 4},
}  # fmt: skip


def case_of(name, device, **more):
    """float16, as the interpreter rounds to bfloat16 towards 0."""
    sizes = {"B": 1, "M": 140, "N": 150, "H": 2, "G": 1, "K": 264, "E": 70, "dtype": torch.float16}
    return make_case(**(sizes | CASES[name] | more), device=device)


@pytest.fixture
def room(monkeypatch):
    # Otherwise sizes as small as these have room for the fewest keys.
    monkeypatch.setattr(strips, "SHARE", 1e6)
    monkeypatch.setattr("lowtide.ops.attention.triton_backend.launch_backward.FEW_SCORES", 0)
    return lambda name: monkeypatch.setattr(strips, "ROOM", ROOMS[name])


IN_ONE = ("plain", "several groups", "sequences without keys", "bias of all scores, soft cap")


VALUES = [*((name, "128 keys") for name in CASES), *((name, "one strip") for name in IN_ONE)]


# Each is the quickest with what it asks of a strip; test_kernels.py and others have the rest.
QUICK = (
    *((name, "128 keys") for name in ("causal", "more queries than keys", "causal sequences")),
    *((name, "128 keys") for name in ("bias of keys", "soft cap and dropout")),
    *((name, "one strip") for name in ("several groups", "sequences without keys")),
)


@pytest.mark.parametrize(("name", "of"), all_extended_but(QUICK, VALUES))
def test_values(device, room, name, of):
    room(of)
    check_triton(case_of(name, device))


@pytest.mark.parametrize("of", all_extended_but(["one strip"], ROOMS))
def test_same_call_same_bits(device, room, of):
    room(of)
    case = case_of("bias of keys", device)
    check_same_bits(case)


@pytest.mark.parametrize("of", ROOMS)
@pytest.mark.parametrize("only", ["query", "key", "value", "bias"])
def test_gradient_of_one_operand(device, room, only, of):
    room(of)
    case = case_of("bias of keys", device)
    case.trained(only)
    check_triton(case)


LAID_OUT = ["every other", "unaligned", "reversed dimensions", "expanded"]


@pytest.mark.parametrize("how", all_extended_but(["expanded"], LAID_OUT))
def test_strides(device, room, how):
    room("128 keys")
    case = case_of("causal", device, B=2, N=140)
    check_triton(*laid_out(case, how))


def test_bool_mask(device, room):
    room("128 keys")
    case = case_of("plain", device)
    shown = torch.rand(1, 1, 140, 150, device=device) < 0.4
    shown[:, :, 5:9] = False
    case = type(case)(case.query, case.key, case.value, shown)
    check_triton(case)


@pytest.mark.parametrize("only", ["query", "key", "value", "bias"])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_gradient_of_one_operand_with_full_bias(device, room, only, softcap):
    room("128 keys")
    case = case_of("bias of all scores", device, softcap=softcap)
    case.trained(only)
    check_triton(case)


@pytest.mark.extended
@pytest.mark.parametrize("of", ROOMS)
def test_memory(device, room, monkeypatch, of):
    """Weights and gradients of scores in their room, the float32 sum of a strip's dq, and rows.

    The sums of parts of the queries, which few keys have, come on top."""
    room(of)
    monkeypatch.setattr(parts_of_queries, "PROGRAMS", 1)
    case = case_of("plain", device, M=1024, N=300, H=2, G=2, E=72)
    peak, gradients = peak_of_backward(case)
    scores = 2 * 2 * 1024 * (2 * 384 if of == "one strip" else 128)
    # The float32 sums of dq, for one head of two.
    sums = 0 if of == "one strip" else 2 * case.query.nbytes // 2
    rows = 3 * 4 * 2 * 1024
    assert peak.bytes <= gradients + scores + sums + rows + (64 << 10)
