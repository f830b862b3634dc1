"""Float32 in pieces of bfloat16: through the interpreter on the CPU, for real on a GPU."""

import pytest
import torch

from tests.ops.attention.helpers import poisoned
from tests.support.loss import skip_unless_runnable

pytest.importorskip("triton")
bf16_split = pytest.importorskip("lowtide.ops.attention.triton_backend.kernels.bf16_split")

SHAPES = [(2, 3, 37, 40), (1, 2, 5, 1), (1, 1, 70, 150), (2, 1, 1, 64)]


def numbers(*shape, device):
    """Of all sizes."""
    return (torch.randn(shape) * torch.exp(10 * torch.randn(shape))).to(device)


def total(found):
    return sum(piece.double() for piece in found)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_three_pieces_exact(device, shape):
    skip_unless_runnable("triton", device)
    x = numbers(*shape, device=device)
    found = bf16_split.split([x], 3)[0]
    assert found.shape == (3, *shape)
    assert found.dtype == torch.bfloat16
    assert torch.equal(total(found), x.double())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_two_pieces_rounding(device, shape):
    skip_unless_runnable("triton", device)
    x = numbers(*shape, device=device)
    found = bf16_split.split([x], 2)[0]
    assert (total(found) - x).abs().le(2.0**-17 * x.abs().double()).all()
    assert torch.equal(found[0], x.bfloat16())


@pytest.mark.parametrize("count", [2, 3])
def test_several_tensors(device, count):
    """As many programs as the largest needs; nothing but that of the others is written."""
    skip_unless_runnable("triton", device)
    shapes = [(2, 6, 70, 20), (2, 3, 33, 20), (2, 0, 9, 1), (2, 3, 0, 150), (1, 3, 33, 150)]
    tensors = [numbers(*shape, device=device) for shape in shapes]
    found = bf16_split.split(tensors, count)
    for x, got in zip(tensors, found, strict=True):
        assert torch.equal(got, bf16_split.split([x], count)[0])


@pytest.mark.parametrize("how", ["every other", "unaligned", "reversed dimensions", "expanded"])
def test_strides(device, how):
    skip_unless_runnable("triton", device)
    x = poisoned(numbers(2, 4, 33, 20, device=device), how)
    assert torch.equal(total(bf16_split.split([x], 3)[0]), x.double())


def test_rows_zero_padded(device):
    skip_unless_runnable("triton", device)
    found = bf16_split.split([numbers(1, 2, 5, 3, device=device)], 2)[0]
    rows = found.as_strided((2, 1, 2, 5, 16), found.stride())
    assert rows.is_contiguous()
    assert (rows[..., 3:] == 0).all()


@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract:RuntimeWarning")  # NumPy's
def test_nonfinite_in_first_piece(device):
    skip_unless_runnable("triton", device)
    by_its_last_digit = [0x7F800001, -0x7FFFFF]  # nan
    low = torch.tensor(by_its_last_digit, dtype=torch.int32).view(torch.float32)
    x = torch.cat([torch.tensor([torch.inf, -torch.inf, torch.nan, -torch.nan]), low]).to(device)
    first, *rest = bf16_split.split([x.expand(1, 1, 1, 6)], 3)[0].flatten(1)
    torch.testing.assert_close(first.float(), x, equal_nan=True, rtol=0, atol=0)
    assert all((piece == 0).all() for piece in rest)


def test_finite_pieces(device):
    """And 0 stays 0, with its sign."""
    skip_unless_runnable("triton", device)
    most = torch.finfo(torch.float32).max
    x = torch.tensor([most, -most, 3.39e38, 1e-30, -0.0, 0.0, 1.0, -1.0], device=device)
    found = bf16_split.split([x.expand(1, 1, 1, 8)], 3)[0]
    assert torch.equal(total(found).flatten(), x.double())
    assert found[0].flatten().signbit().tolist() == x.signbit().tolist()


def test_numbers_below_bfloat16(device):
    """Below what bfloat16 has, off by half of its last digit."""
    skip_unless_runnable("triton", device)
    x = torch.tensor([1e-38, -1e-40, 1.4e-45], device=device)
    found = bf16_split.split([x.expand(1, 1, 1, 3)], 3)[0]
    assert (total(found).flatten() - x).abs().max() <= 2.0**-134


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4)], ids=str)
def test_empty(device, shape):
    skip_unless_runnable("triton", device)
    assert bf16_split.split([torch.zeros(shape, device=device)], 3)[0].shape == (3, *shape)
