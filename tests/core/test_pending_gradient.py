"""A gradient kept until backward, and the factors that are still to be applied."""

import pytest
import torch

from lowtide.core.pending_gradient import PendingGradient, finish_gradient, outputs_of, scale_into
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
    found = finish_gradient(tensor.clone(), factor, upstream, tensor, backend)
    assert found.dtype == dtype
    assert found.shape == tensor.shape
    error = (found.double() - exact).abs()
    assert (error <= torch.finfo(dtype).eps / 2 * 1.01 * exact.abs() + torch.finfo(dtype).tiny).all()


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("second", [None, 0.7, 2.0])
def test_kernel_takes_both_factors(device, second, in_place):
    """Nothing is written in place where the product of the factors is 1."""
    pytest.importorskip("triton")
    if device == "cpu" and not interpreted():
        pytest.skip("on the CPU the kernels run through the interpreter alone")
    from lowtide.core.kernels.triton_helpers import launch_scaling

    tensor = torch.randn(9001, device=device)
    factor = torch.tensor(0.5, device=device)
    other = None if second is None else torch.tensor(second, device=device)
    expected = torch.empty_like(tensor)
    scale_into(expected, tensor, factor, "torch", second=other)
    out = tensor.clone() if in_place else torch.empty_like(tensor)
    launch_scaling(out, out if in_place else tensor, factor, other)
    assert torch.equal(out, expected)
