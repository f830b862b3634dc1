"""The gradient of a bias of all scores that nothing shares, written by the query gradient's kernel:
through the interpreter on the CPU, for real on a GPU. The same truth and budget as the other
kernels have."""

import pytest
import torch

import lowtide
from lowtide import attn_bias as masks
from tests.ops.attention.helpers import (
    INTERPRETED,
    check_same_bits,
    check_triton,
    make_case,
    peak_of_backward,
    poisoned,
)
from tests.support.loss import norm, skip_unless_runnable

pytest.importorskip("triton")
launch_backward = pytest.importorskip("lowtide.ops.attention.triton_backend.launch_backward")

pytestmark = INTERPRETED

CASES = {
    "plain": {},
    "causal": {"mask": masks.LowerTriangularMask()},
    "local": {"N": 150, "mask": masks.LocalAttentionFromBottomRightMask(3, 2)},  # tiles that nobody sees
    "sequences": {"B": 1, "mask": masks.BlockDiagonalMask.from_seqlens([3, 60, 7], [1, 2, 72])},
    "soft cap": {"softcap": 2.0, "scale": 0.8},
    "dropout": {"p": 0.4, "seed": 9},
    "shared key heads": {"H": 4, "G": 2, "E": 5},
    "one batch": {"B": 1, "bias": (0, 1, 1, 1)},
    "one head": {"H": 1, "bias": (1, 0, 1, 1)},
    "128 features": {"B": 1, "K": 100, "E": 128},
    "extreme scores": {"spread": 300.0},
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_other_way(monkeypatch):
    """Neither strips nor scores that are computed for the bias alone."""

    def refuse(*_given):
        raise AssertionError("another kernel was to write the bias's gradient")

    monkeypatch.setattr(launch_backward, "_in_strips", refuse)
    monkeypatch.setattr(launch_backward.launch_small_problems, "short_bias_gradient", refuse)


def case_of(device, **more):
    sizes = {"B": 2, "M": 70, "N": 75, "H": 2, "bias": (1, 1, 1, 1), "dtype": torch.float16}
    return make_case(**(sizes | more), device=device)


@pytest.mark.parametrize("name", CASES)
def test_values(device, name):
    check_triton(case_of(device, **CASES[name]))


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("wanted", [("bias",), ("query", "bias"), ("value", "bias"), ("key", "bias")])
def test_gradients_of_subset(device, wanted, softcap):
    case = case_of(device, softcap=softcap, mask=masks.LowerTriangularMask())
    case.trained(*wanted)
    check_triton(case)


@pytest.mark.parametrize("how", ["every other", "unaligned", "reversed dimensions"])
def test_bias_strides(device, how):
    case = case_of(device)
    check_triton(
        type(case)(case.query, case.key, case.value, poisoned(case.bias.detach(), how).requires_grad_())
    )


def test_float32_bias_gradient_not_rounded(device):
    """Of operands in half precision, whose dtype strips would have stored it in."""
    skip_unless_runnable("triton", device)
    case = case_of(device)
    leaves = [leaf.detach() for leaf in (case.query, case.key, case.value, case.bias.float())]

    def gradient(leaves, backend):
        bias = leaves[3].clone().requires_grad_()
        out = lowtide.memory_efficient_attention(*leaves[:3], bias, backend=backend)
        return torch.autograd.grad(out, bias, torch.ones_like(out))[0]

    found, exact = gradient(leaves, "triton"), gradient([leaf.double() for leaf in leaves], "reference")
    assert found.dtype == torch.float32
    assert norm(found - exact) < norm(exact.half() - exact) / 2


def test_same_call_same_bits(device):
    case = case_of(device, mask=masks.LowerTriangularMask(), p=0.3, seed=5)
    check_same_bits(case)


@pytest.mark.parametrize("mask", [None, masks.LowerTriangularMask()])
def test_memory_of_rows(device, mask):
    """Beside the gradients backward holds three float32 a row, and no scores."""
    case = case_of(device, M=130, N=130, mask=mask)
    peak, gradients = peak_of_backward(case)
    vectors = 4 * 130 * 8  # the intervals of queries and of keys
    rows = 3 * 4 * 2 * 2 * 130
    assert peak.bytes <= gradients + rows + (vectors if mask else 0) + (8 << 10)
