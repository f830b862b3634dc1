"""A call like one before is handed on by one check, and in no other state than it was."""

import sys

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import lowtide
from lowtide import attn_bias as masks
from lowtide.ops.attention import remembered

CAUSAL = masks.LowerTriangularMask()


def calls(function):
    """The Python functions that a call enters. Their number stands for its host time."""
    entered = []
    function()
    sys.setprofile(lambda frame, event, _: entered.append(frame.f_code.co_name) if event == "call" else None)
    try:
        function()
    finally:
        sys.setprofile(None)
    return entered


@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize("layout", ["torch", "xformers"])
def test_call_alike_is_handed_on_by_one_check(layout, tracked):
    """Torch's own node is the last of the graph, and no more than 24 functions of Python run."""
    tensors = [torch.randn(2, 16, 4, 8, requires_grad=tracked) for _ in range(3)]
    if layout == "torch":

        def call():
            return lowtide.scaled_dot_product_attention(*tensors, is_causal=True)

    else:

        def call():
            return lowtide.memory_efficient_attention(*tensors, CAUSAL)

    assert torch.equal(call(), call())
    entered = calls(call)
    assert "choose_backend" not in entered
    assert len(entered) <= 24, entered
    if tracked:
        node = call().grad_fn
        node = node if layout == "torch" else node.next_functions[0][0]
        assert node.name().startswith("ScaledDotProduct")


def in_vmap(tensors):
    stacked = [torch.stack([each, each]) for each in tensors]
    return torch.vmap(lowtide.scaled_dot_product_attention)(*stacked)[0]


def in_forward_mode(tensors):
    query, key, value = tensors
    given = (query, key, value), tuple(torch.ones_like(each) for each in tensors)
    return torch.func.jvp(lowtide.scaled_dot_product_attention, *given)[1]


def in_autocast(tensors):
    with torch.autocast("cpu", torch.bfloat16):
        return lowtide.scaled_dot_product_attention(*tensors)


def without_fused_kernels(tensors):
    with sdpa_kernel(SDPBackend.MATH):
        return lowtide.scaled_dot_product_attention(*tensors)


def with_saved_tensors_on_cpu(tensors):
    leaves = [each.clone().requires_grad_() for each in tensors]
    with torch.autograd.graph.save_on_cpu():
        out = lowtide.scaled_dot_product_attention(*leaves)
    return torch.autograd.grad(out.sum(), leaves)[1]


def differentiated_twice(tensors):
    leaves = [each.clone().requires_grad_() for each in tensors]
    out = lowtide.scaled_dot_product_attention(*leaves)
    first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
    return torch.autograd.grad(sum(each.square().sum() for each in first), leaves)[0]


STATES = [
    in_vmap,
    in_forward_mode,
    in_autocast,
    without_fused_kernels,
    with_saved_tensors_on_cpu,
    differentiated_twice,
]


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_remembered_call_in_another_state(state):
    """The result is the same whether or not a like call was handed on before."""
    tensors = [torch.randn(2, 4, 16, 8) for _ in range(3)]
    remembered._calls.clear()
    first = state(tensors)
    for requires_grad in (False, True):
        leaves = [each.clone().requires_grad_(requires_grad) for each in tensors]
        lowtide.scaled_dot_product_attention(*leaves)
    assert remembered._calls
    assert torch.equal(state(tensors), first)


def test_remembered_call_does_not_hide_errors():
    tensors = [torch.randn(2, 16, 4, 8) for _ in range(3)]
    lowtide.memory_efficient_attention(*tensors, p=0)
    with pytest.raises(lowtide.core.errors.ArgumentTypeError, match="p must be a float"):
        lowtide.memory_efficient_attention(*tensors, p=False)
    with pytest.raises(ValueError, match="backend must be one of"):
        lowtide.memory_efficient_attention(*tensors, backend=["auto"])
