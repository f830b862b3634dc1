"""What tells a call of the Triton kernels from an earlier one: options, tensors, layouts.

Shapes: B batches.
"""

import weakref

import pytest
import torch

import lowtide
from lowtide import attn_bias as masks
from lowtide.ops.attention import remembered
from tests.ops.attention.helpers import INTERPRETED, make_upstream
from tests.ops.attention.operator.remembered.helpers import (
    CASES,
    CAUSAL,
    TOLD_APART,
    B,
    H,
    K,
    M,
    attention_of,
    case_of,
    changed,
    check_twice,
    least_of,
    repeated,
    results,
    shifted,
)
from tests.support.extended import all_extended_but

pytest.importorskip("triton")
pytestmark = INTERPRETED


@pytest.mark.parametrize("name", all_extended_but(TOLD_APART, [name for name in CASES if name != "plain"]))
def test_each_option_tells_calls_apart(device, recordings, name):
    check_twice(case_of(device))
    recordings.clear()
    check_twice(case_of(device, **CASES[name]))
    assert len(recordings) == 2


def heads_first(leaf):
    return leaf.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()


@pytest.mark.parametrize("name", all_extended_but(["key", "bias"], ["query", "key", "value", "bias"]))
@pytest.mark.parametrize("change", [heads_first, torch.Tensor.detach])
def test_each_tensor_tells_calls_apart(device, recordings, change, name):
    case = case_of(device, bias=(1, 1, 1, 1))
    check_twice(case)
    recordings.clear()
    check_twice(changed(case, name, change))
    assert len(recordings) == 2


@pytest.mark.parametrize("name", all_extended_but(["query", "value"], ["query", "key", "value", "bias"]))
def test_unaligned_tensors_are_recorded_apart(device, recordings, name):
    case = case_of(device, bias=(1, 1, 1, 1))
    check_twice(case)
    recordings.clear()
    check_twice(changed(case, name, shifted))
    assert len(recordings) == 4  # of a call that is known by now


def test_products_in_tf32_tell_calls_apart(device):
    case = case_of(device)
    check_twice(case)
    upstream, before = make_upstream(case), torch.get_float32_matmul_precision()
    exact = results(case, upstream)
    try:
        torch.set_float32_matmul_precision("high")
        recorded_again = results(case, upstream)
        remembered.forget()
        expected = results(case, upstream)
    finally:
        torch.set_float32_matmul_precision(before)
    for name, each in expected.items():
        assert torch.equal(recorded_again[name], each), name
    assert not torch.equal(exact["query"], expected["query"])


@pytest.mark.parametrize(
    "options",
    all_extended_but(
        [{"scale": True}, {"window": (1, True)}],
        [{"p": True}, {"scale": True}, {"softcap": True}, {"window": (1, True)}, {"p": 2.0}],
    ),
)
def test_errors_stay(device, options):
    """An option that equals a remembered one is still refused."""
    case = least_of(device)
    repeated(case, scale=1.0)
    repeated(case, softcap=1.0)
    repeated(case, window=(1, 1))
    with pytest.raises((TypeError, ValueError)):
        attention_of(case, **options)


LENGTHS = ([5, 7], [7, 5], [12], [1, 0, 11])
SEQUENCES = {
    "whole": masks.BlockDiagonalMask.from_seqlens,
    "causal": lambda lengths: masks.BlockDiagonalMask.from_seqlens(lengths).make_causal(),
    "bias": lambda lengths: masks.BlockDiagonalMask.from_seqlens(lengths).add_bias(torch.ones(B, H, M, M)),
}


@pytest.mark.parametrize("window", [None, pytest.param((2, 1), marks=pytest.mark.extended)])
@pytest.mark.parametrize("kind", all_extended_but(["causal"], SEQUENCES))
def test_masks_of_sequences_share_a_recording(device, recordings, kind, window):
    """Sequences reach the kernels as tensors. The gradients of both calls are due at the end."""
    case = case_of(device, B=1)
    leaves, outs = [case.query, case.key, case.value], []
    upstream = torch.randn_like(case.query)
    found = []
    for lengths in LENGTHS:
        mask = SEQUENCES[kind](lengths)
        if mask.bias is not None:
            mask.bias = mask.bias[:1].to(device)
        given = *(each.detach().requires_grad_() for each in leaves), mask
        both = [
            lowtide.memory_efficient_attention(*given, window=window, backend=backend)
            for backend in ("triton", "reference")
        ]
        outs.append((given[:3], both))
    for given, both in reversed(outs):
        found.append([(each, *torch.autograd.grad(each, given, upstream)) for each in both])
    for got, want in found:
        for one, other in zip(got, want):
            torch.testing.assert_close(one, other)
    assert not torch.equal(found[0][0][0], found[1][0][0])
    assert len(recordings) == 2 * (len(LENGTHS) - 1)  # forward and backward of all calls but the first
    assert all(recordings)


def test_graph_keeps_no_bias_beyond_backward(device, recordings):
    """It keeps the mask, whose tensor may be as large as all scores."""
    query = torch.randn(1, M, 1, K, device=device, requires_grad=True)
    for _ in range(3):
        mask = CAUSAL.add_bias(torch.ones(1, 1, M, M, device=device))
        bias = weakref.ref(mask.bias)
        out = lowtide.memory_efficient_attention(query, query, query, mask, backend="triton")
        out.sum().backward()
        del mask
        assert bias() is None
        assert out.grad_fn is not None
    assert len(recordings) == 4  # forward and backward of the second and the third call


class MadeFor(masks.LowerTriangularMask):
    """A mask with a check of its own."""

    def __init__(self, keys):
        self.keys = keys

    def check(self, M, N):
        if self.keys != N:
            raise ValueError(f"made for {self.keys} keys")


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_masks_of_unknown_classes_are_checked(device, backend):
    case = least_of(device)
    tensors = case.query, case.key, case.value
    for _ in range(3):
        lowtide.memory_efficient_attention(*tensors, MadeFor(M), backend=backend)
    with pytest.raises(ValueError, match="made for"):
        lowtide.memory_efficient_attention(*tensors, MadeFor(M + 1), backend=backend)


def test_band_that_changes_before_backward(device):
    """Rows of the band that forward had are kept under it."""
    length, local = 160, masks.LocalAttentionFromBottomRightMask
    given = torch.randn(3, 1, length, 1, K, device=device, requires_grad=True)
    expected = {}
    for right in (0, 100):
        out = lowtide.memory_efficient_attention(*given, local(right, 0), backend="reference")
        (expected[right],) = torch.autograd.grad(out.sum(), given)
    for _ in range(2):
        mask = local(0, 0)
        out = lowtide.memory_efficient_attention(*given, mask, backend="triton")
        mask.band = local(100, 0).band
        torch.testing.assert_close(torch.autograd.grad(out.sum(), given)[0], expected[0])
    for _ in range(2):
        out = lowtide.memory_efficient_attention(*given, local(100, 0), backend="triton")
        torch.testing.assert_close(torch.autograd.grad(out.sum(), given)[0], expected[100])
