"""A gradient kept until backward, and the factors that are still to be applied."""

import math

import pytest
import torch

from lowtide.core.pending_gradient import (
    PendingGradient,
    Scaling,
    finish_gradients,
    fp16_exponents_of_rows,
    fp16_headroom_of_operand,
    outputs_of,
    power_and_rest,
    scale_into,
    split_factor,
)
from tests.support.loss import interpreted


def test_outputs_share_no_memory(device):
    """An absent factor is an empty tensor; one that gradients share is copied but for the first."""
    factor = torch.tensor(3.0, device=device)
    tensors = [torch.ones(4, device=device) for _ in range(4)]
    gradients = [PendingGradient(tensors[0]), *(PendingGradient(each, None, factor) for each in tensors[1:])]
    outputs = outputs_of(gradients)
    assert [each.numel() for each in outputs[1::2]] == [0, 1, 1, 1]
    assert outputs[3] is factor
    assert all(each == 3 for each in outputs[3::2])
    places = [each.untyped_storage().data_ptr() for each in outputs if each.numel()]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (5000,)], ids=str)
@pytest.mark.parametrize("remains", [False, True])
def test_both_factors_are_applied_with_one_rounding(device, backend, dtype, shape, remains):
    if backend == "triton" and dtype == torch.float64:
        pytest.skip("the kernel computes in float32")
    wide = torch.promote_types(dtype, torch.float32)
    tensor = torch.randn(shape, device=device).to(dtype)
    upstream = torch.tensor(0.7, device=device, dtype=wide)
    factor = torch.tensor(0.25, device=device, dtype=wide) if remains else tensor.new_empty(0)
    exact = tensor.double() * upstream.double() * (0.25 if remains else 1)
    (found,) = finish_gradients([tensor.clone(), factor], upstream, [tensor], [True], backend)
    assert found.dtype == dtype
    assert found.shape == tensor.shape
    error = (found.double() - exact).abs()
    assert (error <= torch.finfo(dtype).eps / 2 * 1.01 * exact.abs() + torch.finfo(dtype).tiny).all()


@pytest.mark.parametrize("largest", [2.0**-20, 1.0, 3e4])
@pytest.mark.parametrize("factor", [1 / 3, 2.0**-90, 3e8])
def test_sum_of_a_float16_gradient_is_kept_near_1(device, largest, factor):
    """Whatever the factor, and whatever the largest number: nothing of it is rounded to 0."""
    dx = PendingGradient(
        torch.empty(5, 4, dtype=torch.float16, device=device), unsplit=torch.tensor(factor, device=device)
    )
    sum = torch.linspace(-1, 0.5, 20, device=device).view(5, 4) * largest
    dx.split_by(sum)
    applied, remaining = dx.applied, dx.remaining
    assert 0.25 <= float(applied * sum.abs().amax()) <= 1
    assert float(applied.double() * remaining.double()) == float(torch.tensor(factor).double())
    assert torch.frexp(remaining)[0] == 0.5
    dx.split_by(sum * 8)  # of the first chunk alone
    assert dx.applied is applied


def test_sum_of_no_numbers(device):
    """A head without features has no largest number, and its gradients are empty."""
    factor = torch.tensor(1 / 3, device=device)
    dx = PendingGradient(torch.empty(5, 0, dtype=torch.float16, device=device), unsplit=factor)
    dx.split_by(torch.empty(5, 0, device=device))
    assert torch.equal(dx.applied * dx.remaining, factor)


def test_factor_is_split_whatever_the_default_dtype(device):
    """float16 has no 2^28."""
    factor, before = torch.tensor(3e8, device=device), torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        parts = split_factor(factor, torch.float16), power_and_rest(factor, torch.tensor(28, device=device))
    finally:
        torch.set_default_dtype(before)
    for one, other in parts:
        assert one.dtype == other.dtype == torch.float32
        assert torch.equal(one * other, factor)


@pytest.mark.parametrize("largest", [2.0**-10, 1.0, 3e4, float("nan"), float("inf")])
@pytest.mark.parametrize("factor", [1.0, 1 / 3, 2.0**-20, 77.7])
@pytest.mark.parametrize("below", [0, -5])
def test_power_for_an_operand_of_float16(device, factor, largest, below):
    """X is just below 2^below by it, and the rest is exact."""
    x = torch.tensor([[2.0**-10, largest], [2.0**-12, 0.0]], device=device).half()
    factor = torch.tensor(factor, device=device)
    power, rest = power_and_rest(factor, fp16_headroom_of_operand(x, below))
    assert 0.5 <= float(power) * (largest if math.isfinite(largest) else 65504) / 2**below <= 1
    assert torch.frexp(power)[0] == 0.5
    assert torch.equal(power * rest, factor)
    assert torch.equal(torch.stack(power_and_rest(factor, 3)), torch.stack([factor * 0 + 0.125, factor * 8]))


@pytest.mark.parametrize("rows", [1, 2, 3, 64, 1025, 2048])
@pytest.mark.parametrize("room", [0, 6])
def test_sum_over_all_rows_is_in_float16s_range(rows, room):
    of_coefs, of_input = fp16_exponents_of_rows(rows, room)
    assert rows * 2.0 ** (of_coefs - room) * 2.0**of_input <= 2**14
    assert 0 <= (14 - of_coefs) + of_input <= 1  # each half of what both are brought down by


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("second", [None, 0.7, 2.0])
def test_kernel_takes_both_factors(device, second, in_place):
    """Nothing is written in place where the product of the factors is 1."""
    pytest.importorskip("triton")
    if device == "cpu" and not interpreted():
        pytest.skip("on the CPU the kernels run through the interpreter alone")
    from lowtide.core.kernels.triton_helpers import launch_scalings

    tensor = torch.randn(9001, device=device)
    factor = torch.tensor(0.5, device=device)
    other = None if second is None else torch.tensor(second, device=device)
    expected = torch.empty_like(tensor)
    scale_into(expected, tensor, factor if other is None else factor * other, "torch")
    out = tensor.clone() if in_place else torch.empty_like(tensor)
    launch_scalings([Scaling(out, out if in_place else tensor, factor, other)])
    assert torch.equal(out, expected)


@pytest.mark.parametrize("sizes", [(9001, 30), (30, 9001), (5000, 5000, 1), (0, 7, 0, 9, 40000)], ids=str)
def test_one_launch_scales_two_tensors(device, sizes, monkeypatch):
    """Those with the same factors; each has the bits that it has alone."""
    pytest.importorskip("triton")
    if device == "cpu" and not interpreted():
        pytest.skip("on the CPU the kernels run through the interpreter alone")
    from lowtide.core.kernels import triton_helpers
    from lowtide.core.kernels.triton_helpers import launch_scalings

    half, third = (torch.tensor(each, device=device) for each in (0.5, 1 / 3))
    scalings = []
    for place, size in enumerate(sizes):
        tensor = torch.randn(size, device=device)
        scalings.append(Scaling(torch.empty_like(tensor), tensor, half if place == 2 else third, half))
    launches, kernel = [], triton_helpers._scale_kernel
    monkeypatch.setattr(triton_helpers, "_scale_kernel", _Counted(kernel, launches))
    launch_scalings(scalings)
    for each in scalings:
        expected = torch.empty_like(each.tensor)
        scale_into(expected, each.tensor, each.factor * each.second, "torch")
        assert torch.equal(each.out, expected)
    alike = [size for place, size in enumerate(sizes) if size and place != 2]
    assert len(launches) == -(-len(alike) // 2) + (len(sizes) > 2 and sizes[2] > 0)


class _Counted:
    """A kernel whose launches are counted by their grids."""

    def __init__(self, kernel, launches):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid):
        self.launches.append(grid)
        return self.kernel[grid]
