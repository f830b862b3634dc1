"""A weight that lies by columns has a gradient by columns, which autograd keeps without a copy.

Shapes: N tokens, D features, V classes.
"""

from dataclasses import replace

import pytest
import torch

import lowtide
from lowtide.core.pending_gradient import scale_into
from lowtide.memory import peak_memory
from lowtide.ops.linear_cross_entropy.definition.head import Options
from lowtide.ops.linear_cross_entropy.operator.fake import with_new_graph_facts
from tests.support.loss import check, differentiate, fused, make_inputs, planned, skip_unless_runnable

OPS = torch.ops.lowtide
N, D, V = 37, 24, 64
HALVES = [torch.bfloat16, torch.float16]


def by_columns(matrix):
    return matrix.detach().t().contiguous().t().requires_grad_()


def inputs_by_columns(device, dtype, *, N=N, D=D, V=V, **made):
    inputs = make_inputs(N, D, V, device=device, dtype=dtype, **made)
    return replace(inputs, linear_weight=by_columns(inputs.linear_weight))


# Ways to form dW, and calls that take them; test_one_product_of_logits.py has the single product.
CALLS = {"accumulate": {}, "class_blocks": {"workspace": 100_000, "V": 640}}


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("way", CALLS)
def test_values_and_strides(device, way, backend, dtype, bias, reduction):
    skip_unless_runnable(backend, device)
    sizes = {"N": N, "V": V, **CALLS[way]}
    options = {"workspace": sizes.pop("workspace", None), "backend": backend, "reduction": reduction}
    inputs = inputs_by_columns(device, dtype, bias=bias, **sizes)
    if dtype in HALVES and device == "cpu":  # a card forms dW of few tokens by a single product
        made = planned(inputs, options["workspace"] or 1 << 24, backend=backend, reduction=reduction)
        assert made.weight_gradient == way
    result = differentiate(fused, inputs, **options)
    check(result, inputs, reduction=reduction)
    assert result["linear_weight"].stride() == (1, sizes["V"])


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_strides_of_the_operator_and_its_fake(device, reduction):
    inputs = inputs_by_columns(device, torch.float32)
    x, w = inputs.input.detach(), inputs.linear_weight.detach()
    wanted = True, True, False, False
    call = [x], [w], None, None, inputs.target, None, None, None, wanted, *Options(reduction=reduction)
    call = with_new_graph_facts("lowtide::linear_cross_entropy", call)
    torch.library.opcheck(OPS.linear_cross_entropy.default, call)
    if reduction == "none":
        loss_N, *statistics = OPS.linear_cross_entropy(*call)
        backward = torch.randn_like(loss_N), statistics, *call
        torch.library.opcheck(OPS.linear_cross_entropy_backward.default, backward)
        found = OPS.linear_cross_entropy_backward(*backward)
        assert [each.stride() for each in found] == [(D, 1), (1, V)]


def test_memory_of_a_transposed_parameter():
    """Neither backward nor autograd holds a second gradient."""
    inputs = make_inputs(64, 64, 4096)
    x, y = inputs.input.detach(), inputs.target
    parameter = inputs.linear_weight.detach().t().contiguous().requires_grad_()  # [D, V]

    def step():
        lowtide.linear_cross_entropy(x, parameter.t(), y, workspace=1 << 19).backward()
        gradient, parameter.grad = parameter.grad, None
        return gradient

    step()
    with peak_memory("cpu") as peak:
        gradient = step()
    assert gradient.is_contiguous()
    assert peak.bytes <= gradient.nbytes + (1 << 19) + (1 << 16)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_scaling_between_layouts(device, backend):
    """Triton's kernel reads memory in its order, so it must not take tensors that lie otherwise."""
    skip_unless_runnable(backend, device)
    tensor, factor = torch.randn(6, 5, device=device), torch.tensor(0.5, device=device)
    out = torch.empty(5, 6, device=device).t()
    scale_into(out, tensor, factor, backend)
    assert torch.equal(out, tensor * 0.5)
