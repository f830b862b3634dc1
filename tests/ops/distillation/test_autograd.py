"""Scaled, repeated, partial and hooked backward passes."""

import copy
from dataclasses import replace

import pytest
import torch

from lowtide import distillation
from tests.ops.distillation.helpers import (
    REDUCTIONS,
    check,
    dense,
    differentiate,
    fused,
    gradients,
    make_inputs,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SOME = (("student_input",), ("student_weight",), ("student_bias",), ("student_weight", "student_input"))


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("factor", [3.0, -0.37, 0.0, 2.0**-10])
def test_loss_scaled(device, factor, reduction, dtype):
    inputs = make_inputs(device=device, dtype=dtype, bias=True)
    by_seed = differentiate(fused, inputs, "forward", factor, reduction=reduction)
    check(by_seed, inputs, "forward", factor, reduction=reduction)
    for name, gradient in gradients(fused(inputs, "forward", reduction=reduction) * factor, inputs).items():
        assert torch.equal(gradient, by_seed[name]), name


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_loss_changed_in_place_and_summed(device, reduction):
    inputs = make_inputs(device=device, dtype=torch.float64, bias=True)
    loss = fused(inputs, "reverse", reduction=reduction)
    loss *= -3.0
    found = gradients(loss.sum() + inputs.student_bias.sum(), inputs)
    found["student_bias"] -= 1
    expected = gradients(dense(inputs, "reverse", reduction=reduction).sum(), inputs)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], -3 * gradient)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_retained_graph_exact(device, reduction, dtype):
    inputs = make_inputs(device=device, dtype=dtype, bias=True)
    loss = fused(inputs, "forward", reduction=reduction)
    kept = []
    for last, upstream in ((False, 0.3), (False, -2.0), (False, 0.3), (True, 1.7)):
        seed = torch.full_like(loss, upstream)
        result = gradients(loss, inputs, grad_outputs=seed, retain_graph=not last)
        kept.append((result, copy.deepcopy(result)))
        check({"loss": loss.detach(), **result}, inputs, "forward", upstream, reduction=reduction)
    for result, then in kept:  # a later backward leaves earlier gradients alone
        for name, gradient in result.items():
            assert torch.equal(gradient, then[name]), name
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("names", SOME)
def test_gradients_of_subset(device, names, reduction, dtype):
    """By asking for some of them, and by freezing the others."""
    inputs = make_inputs(device=device, dtype=dtype, bias=True)
    everything = differentiate(fused, inputs, "js 0.5", reduction=reduction)
    loss = fused(inputs, "js 0.5", reduction=reduction).sum()
    asked = torch.autograd.grad(loss, tuple(getattr(inputs, name) for name in names))
    others = {name: leaf.detach() for name, leaf in inputs.leaves().items() if name not in names}
    frozen = differentiate(fused, replace(inputs, **others), "js 0.5", reduction=reduction)
    assert frozen.keys() == {"loss", *names}
    for name, gradient in zip(names, asked):
        assert torch.equal(gradient, everything[name]), name
        assert torch.equal(gradient, frozen[name]), name


def test_teacher_takes_no_gradient(device):
    inputs = make_inputs(device=device)
    inputs.teacher_input.requires_grad_(), inputs.teacher_weight.requires_grad_()
    fused(inputs, "forward").backward()
    assert inputs.teacher_input.grad is None
    assert inputs.teacher_weight.grad is None
    alone = replace(
        inputs, student_input=inputs.student_input.detach(), student_weight=inputs.student_weight.detach()
    )
    assert not fused(alone, "forward").requires_grad


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_weight_shared_by_both(device, reduction):
    """Self-distillation: the teacher's use of the shared weight adds nothing to its gradient."""
    inputs = make_inputs(17, 8, 21, 8, device=device, dtype=torch.float64)
    shared = replace(inputs, teacher_weight=inputs.student_weight)
    apart = replace(inputs, teacher_weight=inputs.student_weight.detach())
    for name, gradient in gradients(dense(apart, "forward", reduction=reduction).sum(), apart).items():
        found = torch.autograd.grad(
            fused(shared, "forward", reduction=reduction).sum(), getattr(shared, name)
        )
        torch.testing.assert_close(found[0], gradient)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_hooks_once(device, reduction):
    inputs = make_inputs(device=device, bias=True)
    expected = differentiate(fused, inputs, "forward", reduction=reduction)
    seen, accumulated = [], []
    for name, leaf in inputs.leaves().items():
        leaf.register_hook(lambda gradient, name=name: seen.append((name, gradient.clone())))
        leaf.register_post_accumulate_grad_hook(lambda leaf, name=name: accumulated.append(name))
    fused(inputs, "forward", reduction=reduction).sum().backward()
    assert sorted(accumulated) == sorted(name for name, _ in seen) == sorted(inputs.leaves())
    for name, gradient in seen:
        assert torch.equal(gradient, expected[name])
        assert torch.equal(inputs.leaves()[name].grad, expected[name])


def test_tied_student_gradient_once(device):
    """One tensor is both input and weight, also where the gradient is differentiated."""
    from lowtide.ops.distillation import forward_kl

    student = torch.randn(5, 5, dtype=torch.float64, device=device, requires_grad=True)
    teacher = torch.randn(5, 5, dtype=torch.float64, device=device)
    (plain,) = torch.autograd.grad(forward_kl(student, student, teacher, teacher), student)
    (again,) = torch.autograd.grad(forward_kl(student, student, teacher, teacher), student, create_graph=True)
    torch.testing.assert_close(again.detach(), plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("blocks", [False, True], ids=["sum", "class blocks"])
@pytest.mark.parametrize(
    "divergence", [distillation.forward_kl, distillation.reverse_kl], ids=["forward", "reverse"]
)
def test_large_float16_gradients(device, divergence, blocks):
    """A frequent class, and features whose mean is not 0: sums over all rows beyond float16.

    The row of a rare class keeps its digits beside them.
    """
    N, D, V = 4096, 32, 256
    torch.manual_seed(0)
    x, teacher = ((torch.randn(N, D) + 1).to(device, torch.float16) for _ in range(2))
    w, teacher_w = ((torch.randn(V, D) / 8).to(device, torch.float16) for _ in range(2))
    bias, teacher_bias = torch.zeros(2, V, device=device, dtype=torch.float16)
    bias[3] = teacher_bias[5] = 12
    bias[7] = -10
    room = {"cpu": 300_000, "cuda": 700_000}[device] if blocks else None

    def gradients(dtype, **options):
        own = [each.to(dtype).requires_grad_() for each in (x, w)]
        others = teacher.to(dtype), teacher_w.to(dtype)
        biases = {"student_bias": bias.to(dtype), "teacher_bias": teacher_bias.to(dtype)}
        loss = divergence(*own, *others, **biases, **options)
        return torch.autograd.grad(loss, own, loss.new_tensor(32768))  # for float16's digits

    (dx, dw), (wanted_dx, wanted_dw) = gradients(torch.float16, workspace=room), gradients(torch.float64)
    rows = (dx, wanted_dx, 2e-3), (dw, wanted_dw, 2e-3), (dw[7], wanted_dw[7], 5e-3)
    for found, wanted, bound in rows:
        error = (found.double() - wanted).norm() / wanted.norm()
        assert error < bound, error
