"""Beside the rest of torch: checkpointing, transforms, compilation."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.support.loss import Inputs, check, differentiate, fused, make_inputs

REDUCTIONS = ["mean", "sum", "none"]


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpointing(device, dtype, reduction, use_reentrant):
    inputs = make_inputs(device=device, dtype=dtype, bias=True)

    def checkpointed(inputs, **options):
        def loss(input, linear_weight, linear_bias):
            return fused(Inputs(input, linear_weight, inputs.target, linear_bias), **options)

        return checkpoint(
            loss, inputs.input, inputs.linear_weight, inputs.linear_bias, use_reentrant=use_reentrant
        )

    plain = differentiate(fused, inputs, 0.3, reduction=reduction)
    loss = checkpointed(inputs, reduction=reduction)
    loss.backward(torch.full_like(loss, 0.3))
    assert torch.equal(loss.detach(), plain["loss"])
    for name, leaf in inputs.leaves().items():
        assert torch.equal(leaf.grad, plain[name]), name


def test_transforms_of_reference(device):
    inputs = make_inputs(device=device, dtype=torch.float64)
    expected = differentiate(fused, inputs)

    def loss(x):
        return fused(Inputs(x, inputs.linear_weight.detach(), inputs.target), backend="reference")

    gradient = torch.func.grad(loss)(inputs.input.detach())
    torch.testing.assert_close(gradient, expected["input"], rtol=1e-12, atol=1e-14)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo itself reads .grad of an intermediate
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compile_breaks_graph(device, dtype, reduction):
    torch.compiler.reset()
    inputs = make_inputs(device=device, dtype=dtype, bias=True)

    @torch.compile(backend="eager")
    def compiled(input, linear_weight, target, linear_bias):
        loss = fused(Inputs(input * 1, linear_weight, target, linear_bias), reduction=reduction)
        return loss * 2 / 2

    def loss_of(inputs, reduction):
        return compiled(inputs.input, inputs.linear_weight, inputs.target, inputs.linear_bias)

    check(differentiate(loss_of, inputs, reduction=reduction), inputs, reduction=reduction)
