"""The promise of `workspace`, counted by the allocator."""

from dataclasses import replace

import pytest
import torch

from lowtide.memory import peak_memory
from tests.ops.distillation.helpers import DIVERGENCES, REDUCTIONS, fused, make_inputs
from tests.support.extended import all_extended_but
from tests.support.loss import smallest_workspace

# With these sizes, a single row of logits too many exceeds the promise.
# No workspace counts the copy that features which are no multiple of 8 take on CUDA.
N, D_S, V, D_T = 16, 8, 16384, 8


def measured(inputs, divergence, times, reduction, **caps):
    def call(workspace):
        return fused(inputs, divergence, workspace=workspace, reduction=reduction, temperature=1.3, **caps)

    workspace = times * smallest_workspace(call)
    call(workspace).sum().backward()  # libraries are loaded
    for leaf in inputs.leaves().values():
        leaf.grad = None
    return call, workspace


def held_by_gradients(inputs):
    return sum(leaf.nbytes for leaf in inputs.leaves().values())


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("divergence", ["forward", "reverse", "js 0.5"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("caps", [{}, {"student_softcap": 3.0, "teacher_softcap": 3.0}], ids=["", "capped"])
def test_workspace_kept_forward_and_backward(device, dtype, divergence, reduction, times, caps):
    inputs = make_inputs(N, D_S, V, D_T, device=device, dtype=dtype, bias=True)
    call, workspace = measured(inputs, divergence, times, reduction, **caps)
    with peak_memory(device) as peak:
        call(workspace).sum().backward()
    assert peak.bytes <= workspace + held_by_gradients(inputs) + 4 * N
    assert peak.largest < N * V * 4
    with torch.no_grad(), peak_memory(device) as peak:
        loss = call(workspace)
    assert peak.bytes <= workspace + loss.nbytes


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_of_many_rows(device, dtype, reduction):
    inputs = make_inputs(2048, 8, 128, 8, device=device, dtype=dtype)
    call, workspace = measured(inputs, "js 0.5", 8, reduction)
    with peak_memory(device) as peak:
        call(workspace).sum().backward()
    assert peak.bytes <= workspace + held_by_gradients(inputs) + 4 * 2048


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shifted_input_not_copied(device, dtype):
    inputs = make_inputs(N, 512, 64, 512, device=device, dtype=dtype, ignored=0)
    wide = torch.randn(8, 129, 512).to(device, dtype)
    inputs = replace(inputs, student_input=wide[:, :-1].requires_grad_(), teacher_input=wide[:, 1:])
    call, workspace = measured(inputs, "forward", 5, "mean")
    assert workspace < inputs.student_input.nbytes
    leaves = tuple(inputs.leaves().values())
    with peak_memory(device) as peak:
        torch.autograd.grad(call(workspace), leaves)
    assert peak.bytes <= workspace + held_by_gradients(inputs)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frozen_weight_allocates_nothing(device, dtype, reduction):
    inputs = make_inputs(N, 64, V, D_T, device=device, dtype=dtype)
    inputs = replace(inputs, student_weight=inputs.student_weight.detach())
    call, workspace = measured(inputs, "reverse", 1, reduction)
    with peak_memory(device) as peak:
        call(workspace).sum().backward()
    assert peak.largest < V * 64 * dtype.itemsize
    assert peak.bytes <= workspace + held_by_gradients(inputs) + 4 * N


def test_default_workspace(device):
    promised, rows, classes = (64 << 20, 256, 65536) if device == "cpu" else (1 << 30, 8192, 65536)
    inputs = make_inputs(rows, 8, classes, 8, device=device)
    fused(inputs, "forward").backward()
    for leaf in inputs.leaves().values():
        leaf.grad = None
    with peak_memory(device) as peak:
        fused(inputs, "forward").backward()
    assert promised // 2 <= peak.bytes <= promised + held_by_gradients(inputs) + 4


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_retained_graph_memory(device, reduction):
    inputs = make_inputs(N, D_S, V, D_T, device=device)
    call, workspace = measured(inputs, "forward", 1, reduction)
    with peak_memory(device) as peak:
        call(workspace).sum().backward(retain_graph=True)
    assert peak.bytes <= workspace + 2 * held_by_gradients(inputs) + 4 * N


@pytest.mark.parametrize("caps", [{}, {"student_softcap": 3.0, "teacher_softcap": 3.0}], ids=["", "capped"])
@pytest.mark.parametrize("divergence", all_extended_but(["forward"], DIVERGENCES))
def test_workspace_kept_by_higher_orders(device, divergence, caps):
    """Copies of the operands apart."""
    inputs = make_inputs(256, 4, 4096, 4, device=device, ignored=0)
    workspace = 4 << 20  # memory for all logits, which are twice as large with both heads

    def second():
        loss = fused(inputs, divergence, workspace=workspace, **caps)
        (first,) = torch.autograd.grad(loss, inputs.student_input, create_graph=True)
        return torch.autograd.grad(first.square().sum(), inputs.student_input)

    second()
    with peak_memory(device) as peak:
        second()
    assert peak.bytes <= workspace + 8 * held_by_gradients(inputs)
