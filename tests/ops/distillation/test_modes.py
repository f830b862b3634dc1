"""Around a call: autocast, checkpoints, compilation, capture, export; no waits, equal bits."""

from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lowtide.ops.distillation import forward_kl
from lowtide.ops.distillation.heads import DistillationOptions, Heads
from tests.conftest import ON_CUDA_ALONE
from tests.ops.distillation.helpers import (
    DIVERGENCES,
    HALVES,
    REDUCTIONS,
    as_function,
    differentiate,
    fused,
    gradients,
    make_inputs,
    small,
)
from tests.support.cuda_graphs import captured
from tests.support.extended import all_extended_but
from tests.support.loss import no_synchronisation, norm

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Dynamo's own.
COMPILED = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_no_grad_same_loss(device, reduction, mode):
    inputs = make_inputs(device=device, bias=True)
    expected = fused(inputs, "forward", reduction=reduction)
    with mode():
        loss = fused(inputs, "forward", reduction=reduction)
        assert fused(make_inputs(device=device), "forward").isfinite()
    assert not loss.requires_grad
    assert torch.equal(loss, expected.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALVES])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_same_call_same_bits(device, reduction, dtype):
    inputs = make_inputs(111, 63, 507, device=device, dtype=dtype, bias=True)
    first, again = (differentiate(fused, inputs, "js 0.1", 0.3, reduction=reduction) for _ in range(2))
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name]), name


@ON_CUDA_ALONE
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_no_device_sync(device, divergence, reduction, dtype):
    inputs = make_inputs(device=device, dtype=dtype, bias=True)
    upstream = torch.rand(inputs.leading if reduction == "none" else (), device=device)
    differentiate(fused, inputs, divergence, upstream, reduction=reduction)  # libraries are loaded
    with no_synchronisation(device):
        differentiate(fused, inputs, divergence, upstream, reduction=reduction)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_checkpointing(device, reduction, reentrant):
    inputs = make_inputs(device=device, bias=True)
    expected = gradients(fused(inputs, "reverse", reduction=reduction).sum(), inputs)
    loss, leaves = as_function(inputs, "reverse", reduction=reduction)
    checkpoint(loss, *leaves, use_reentrant=reentrant).sum().backward()
    for name, leaf in inputs.leaves().items():
        assert torch.equal(leaf.grad, expected[name]), name


def test_saved_tensors_moved(device):
    inputs = make_inputs(device=device)
    expected = gradients(fused(inputs, "forward"), inputs)
    with torch.autograd.graph.save_on_cpu():
        loss = fused(inputs, "forward")
    for name, gradient in gradients(loss, inputs).items():
        assert torch.equal(gradient, expected[name])


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("amp", HALVES)
def test_autocast(device, amp, reduction):
    """Operands in autocast's dtype, leaves and their gradients in their own."""
    inputs = make_inputs(device=device, bias=True)
    with torch.autocast(device, dtype=amp):
        result = differentiate(fused, inputs, "forward", reduction=reduction)
    rounded = {
        name: each.detach().to(amp)
        for name, each in inputs.items()
        if "bias" not in name and name != "ignored"
    }
    for name in ("student_input", "student_weight"):
        rounded[name].requires_grad_()
    rounded["student_bias"] = inputs.student_bias.detach().to(amp).requires_grad_()
    rounded["teacher_bias"] = inputs.teacher_bias.to(amp)
    expected = differentiate(fused, replace(inputs, **rounded), "forward", reduction=reduction)
    for name, tensor in expected.items():
        assert result[name].dtype == torch.float32
        assert norm(result[name] - tensor.float()) <= 4 * torch.finfo(amp).eps * norm(tensor)


@pytest.mark.parametrize("amp", HALVES)
def test_autocast_of_the_definition(device, amp):
    """A transform runs the definition in chunks, which rounds what the operator rounds."""
    inputs = make_inputs(device=device)
    with torch.autocast(device, dtype=amp):
        loss = fused(inputs, "forward")

        def of_batch(student_input):
            return fused(replace(inputs, student_input=student_input), "forward")

        batched = torch.func.vmap(of_batch)(inputs.student_input[None])
    torch.testing.assert_close(batched[0], loss, rtol=1e-5, atol=1e-6)


@COMPILED
@pytest.mark.parametrize("dtype", all_extended_but([torch.float32], [torch.float32, torch.bfloat16]))
@pytest.mark.parametrize("reduction", all_extended_but(["mean"], REDUCTIONS))
def test_compile_one_graph(device, reduction, dtype):
    torch.compiler.reset()
    inputs = make_inputs(device=device, dtype=dtype, bias=True)
    loss, leaves = as_function(inputs, "js 0.1", reduction=reduction, temperature=1.3, student_softcap=3.0)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    upstream = (
        torch.randn(inputs.leading, device=device)
        if reduction == "none"
        else torch.tensor(0.3, device=device)
    )
    expected = torch.autograd.grad(loss(*leaves), leaves, upstream)
    found = torch.autograd.grad(compiled(*leaves), leaves, upstream)
    assert all(map(torch.equal, found, expected))
    with torch.no_grad():
        assert torch.equal(compiled(*leaves), loss(*leaves))


@COMPILED
def test_compile_any_length_once(device):
    torch.compiler.reset()
    inputs = make_inputs(64, device=device)
    w, teacher_w = inputs.student_weight, inputs.teacher_weight

    def loss(x, t, ignored):
        return forward_kl(x, w, t, teacher_w, ignored=ignored, workspace=60_000)

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=True)
    graphs = []
    for N in (64, 40, 17, 33):
        rows = (
            each.detach()[:N].clone() for each in (inputs.student_input, inputs.teacher_input, inputs.ignored)
        )
        x, t, ignored = rows
        x.requires_grad_()
        assert torch.equal(compiled(x, t, ignored), loss(x, t, ignored))
        compiled(x, t, ignored).backward()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert len(set(graphs)) == 1


@pytest.mark.parametrize("beta", [0.0, 1.0, 0.3])
@pytest.mark.parametrize(
    ("reduction", "wanted"), [("mean", [True] * 3), ("sum", [False, True, False]), ("none", [True] * 3)]
)
def test_opcheck(device, beta, reduction, wanted):
    inputs = small(device, torch.float32)
    heads = Heads(
        inputs.student_input.detach(),
        inputs.student_weight.detach(),
        inputs.student_bias.detach(),
        inputs.teacher_input,
        inputs.teacher_weight,
        None,
        inputs.ignored,
    )
    arguments = (*heads, wanted, *DistillationOptions(beta, 1.3, reduction, None, 2.0, 3.0))
    if reduction == "none":
        upstream = torch.randn(5, device=device)
        torch.library.opcheck(torch.ops.lowtide.distillation_backward.default, (upstream, None, *arguments))
        arguments = (*heads, [False] * 3, *arguments[len(heads) + 1 :])
    torch.library.opcheck(torch.ops.lowtide.distillation.default, arguments)


@ON_CUDA_ALONE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_cuda_graph(device, divergence, dtype):
    inputs = make_inputs(device=device, dtype=dtype, bias=True)
    leaves = tuple(inputs.leaves().values())

    def step():
        return torch.autograd.grad(fused(inputs, divergence), leaves)

    expected = step()
    graph, found = captured(step)
    graph.replay()
    assert all(map(torch.equal, found, expected))


def test_export(device):
    inputs = small(device, torch.float32)

    class Loss(torch.nn.Module):
        def forward(self, x, w, b):
            return fused(replace(inputs, student_input=x, student_weight=w, student_bias=b), "forward")

    leaves = tuple(leaf.detach() for leaf in inputs.leaves().values())
    exported = torch.export.export(Loss(), leaves).module()
    assert torch.equal(exported(*leaves), fused(inputs, "forward").detach())


@COMPILED
@pytest.mark.parametrize("transform", [torch.func.grad, torch.vmap])
def test_compile_refuses_transform(device, transform):
    """The operator would know nothing of it: a silent 0."""
    inputs = make_inputs(device=device, ignored=0)
    w, teacher = inputs.student_weight.detach(), (inputs.teacher_input, inputs.teacher_weight)

    def transformed(x):
        return transform(lambda x: forward_kl(x, w, *teacher))(x)

    torch.compiler.reset()
    x = inputs.student_input.detach()[None] if transform is torch.vmap else inputs.student_input.detach()
    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        torch.compile(transformed, backend="eager", fullgraph=True)(x)
    torch.compiler.reset()
