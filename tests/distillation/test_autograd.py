"""The autograd contract: scaled, repeated, partial and hooked backward passes, higher orders, modes."""

import copy
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lowtide.distillation import autograd, forward_kl, transforms
from lowtide.distillation.heads import Heads, Options
from tests.distillation import (
    DIVERGENCES,
    HALVES,
    REDUCTIONS,
    check,
    dense,
    differentiate,
    fused,
    make_inputs,
)
from tests.helpers import no_synchronisation, norm

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Dynamo's own.
COMPILED = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
SOME = (("student_input",), ("student_weight",), ("student_bias",), ("student_weight", "student_input"))


def gradients(loss, inputs, **options):
    leaves = inputs.leaves()
    return dict(zip(leaves, torch.autograd.grad(loss, tuple(leaves.values()), **options)))


def small(device="cpu", dtype=torch.float64):
    return make_inputs(5, 4, 7, 3, device=device, dtype=dtype, bias=True)


def as_function(inputs, divergence, **options):
    """Of the student's three tensors."""

    def loss(x, w, b):
        return fused(
            replace(inputs, student_input=x, student_weight=w, student_bias=b), divergence, **options
        )

    return loss, tuple(inputs.leaves().values())


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("factor", [3.0, -0.37, 0.0, 2.0**-10])
def test_a_scaled_loss(device, factor, reduction, dtype):
    inputs = make_inputs(device=device, dtype=dtype, bias=True)
    by_seed = differentiate(fused, inputs, "forward", factor, reduction=reduction)
    check(by_seed, inputs, "forward", factor, reduction=reduction)
    for name, gradient in gradients(fused(inputs, "forward", reduction=reduction) * factor, inputs).items():
        assert torch.equal(gradient, by_seed[name]), name


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_loss_changed_in_place_and_added_to_another(device, reduction):
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
def test_a_retained_graph_is_exact_every_time(device, reduction, dtype):
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
def test_gradients_of_some(device, names, reduction, dtype):
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


def test_the_teacher_is_constant(device):
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
def test_one_weight_for_both(device, reduction):
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
def test_hooks_fire_once(device, reduction):
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


@pytest.mark.parametrize("caps", [{}, {"student_softcap": 2.0, "teacher_softcap": 3.0}], ids=["", "capped"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_any_order_of_derivative(device, divergence, reduction, caps):
    loss, leaves = as_function(
        small(device), divergence, reduction=reduction, temperature=1.3, workspace=40_000, **caps
    )
    assert torch.autograd.gradcheck(loss, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(loss, leaves, fast_mode=True)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_higher_orders_are_finite_where_probabilities_are_not(device, divergence):
    """Classes excluded by both, and confident rows."""
    inputs = make_inputs(device=device, bias=True, scale=100)
    with torch.no_grad():
        inputs.student_bias[3] = inputs.teacher_bias[3] = -torch.inf
    loss = fused(inputs, divergence)
    first = torch.autograd.grad(loss, tuple(inputs.leaves().values()), create_graph=True)
    second = torch.autograd.grad(sum(each.sum() for each in first), inputs.student_input)
    plain = differentiate(fused, inputs, divergence)
    for gradient, name in zip(first, inputs.leaves()):
        assert norm(gradient - plain[name]) <= 1e-4 * norm(plain[name]) + 1e-6
    assert second[0].isfinite().all()


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_transforms(device, divergence, reduction):
    inputs = small(device)
    loss, leaves = as_function(inputs, divergence, reduction=reduction)
    x, w, b = (leaf.detach() for leaf in leaves)

    def total(x, w, b):
        return loss(x, w, b).sum()

    expected = torch.autograd.grad(total(*leaves), leaves)
    for found, gradient in zip(torch.func.grad(total, (0, 1, 2))(x, w, b), expected):
        torch.testing.assert_close(found, gradient)
    moved = torch.randn_like(x)
    value, tangent = torch.func.jvp(lambda x: total(x, w, b), (x,), (moved,))
    torch.testing.assert_close((value, tangent), (total(x, w, b), (moved * expected[0]).sum()))
    batch = torch.stack((x, 2 * x))
    for element, found in enumerate(torch.func.vmap(torch.func.grad(lambda x: total(x, w, b)))(batch)):
        torch.testing.assert_close(found, torch.func.grad(lambda x: total(x, w, b))(batch[element]))
    torch.testing.assert_close(torch.func.vmap(lambda x: loss(x, w, b))(batch)[0], loss(x, w, b))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_batched_upstream_gradients(device, reduction):
    inputs = small(device)
    loss = fused(inputs, "forward", reduction=reduction)
    upstream = torch.randn(3, *loss.shape, dtype=loss.dtype, device=device)
    batched = gradients(loss, inputs, grad_outputs=upstream, is_grads_batched=True, retain_graph=True)
    for element, seed in enumerate(upstream):
        for name, gradient in gradients(loss, inputs, grad_outputs=seed, retain_graph=True).items():
            torch.testing.assert_close(batched[name][element], gradient)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_without_gradients_the_same_loss(device, reduction, mode):
    inputs = make_inputs(device=device, bias=True)
    expected = fused(inputs, "forward", reduction=reduction)
    with mode():
        loss = fused(inputs, "forward", reduction=reduction)
        assert fused(make_inputs(device=device), "forward").isfinite()
    assert not loss.requires_grad
    assert torch.equal(loss, expected.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALVES])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_same_call_gives_the_same_bits(device, reduction, dtype):
    inputs = make_inputs(111, 63, 507, device=device, dtype=dtype, bias=True)
    first, again = (differentiate(fused, inputs, "js 0.1", 0.3, reduction=reduction) for _ in range(2))
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name]), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_nothing_waits_for_the_device(device, divergence, reduction, dtype):
    inputs = make_inputs(device=device, dtype=dtype, bias=True)
    upstream = torch.rand(37 if reduction == "none" else (), device=device)
    differentiate(fused, inputs, divergence, upstream, reduction=reduction)  # libraries are loaded
    with no_synchronisation(device):
        differentiate(fused, inputs, divergence, upstream, reduction=reduction)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_activation_checkpointing(device, reduction, reentrant):
    inputs = make_inputs(device=device, bias=True)
    expected = gradients(fused(inputs, "reverse", reduction=reduction).sum(), inputs)
    loss, leaves = as_function(inputs, "reverse", reduction=reduction)
    checkpoint(loss, *leaves, use_reentrant=reentrant).sum().backward()
    for name, leaf in inputs.leaves().items():
        assert torch.equal(leaf.grad, expected[name]), name


def test_saved_tensors_may_move(device):
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


@COMPILED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_whole_compiled_graph(device, reduction, dtype):
    torch.compiler.reset()
    inputs = make_inputs(device=device, dtype=dtype, bias=True)
    loss, leaves = as_function(inputs, "js 0.1", reduction=reduction, temperature=1.3, student_softcap=3.0)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    upstream = torch.randn(37, device=device) if reduction == "none" else torch.tensor(0.3, device=device)
    expected = torch.autograd.grad(loss(*leaves), leaves, upstream)
    found = torch.autograd.grad(compiled(*leaves), leaves, upstream)
    assert all(map(torch.equal, found, expected))
    with torch.no_grad():
        assert torch.equal(compiled(*leaves), loss(*leaves))


@COMPILED
def test_no_length_compiles_anew(device):
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
def test_the_operators_are_registered_right(device, beta, reduction, wanted):
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
    upstream = torch.randn(5, device=device) if reduction == "none" else None
    options = Options(beta, 1.3, reduction, torch.float32, torch.float32, None, 2.0, 3.0)
    arguments = (*heads, upstream, wanted, *options)
    torch.library.opcheck(torch.ops.lowtide.distillation.default, arguments)
    scaled = (torch.randn(3, 4, device=device), torch.rand((), device=device), torch.bfloat16)
    torch.library.opcheck(torch.ops.lowtide.distillation_scaled.default, scaled)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_a_captured_cuda_graph(device, divergence, dtype):
    if device == "cpu":
        pytest.skip("there are none")
    inputs = make_inputs(device=device, dtype=dtype, bias=True)
    leaves = tuple(inputs.leaves().values())

    def step():
        return torch.autograd.grad(fused(inputs, divergence), leaves)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        expected = step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
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


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_the_reference_is_the_same(device, divergence):
    inputs = make_inputs(device=device, dtype=torch.float64, bias=True)
    tensors = dict(inputs.items())
    beta = float(divergence[3:]) if divergence.startswith("js") else float(divergence == "reverse")
    options = Options(beta, 1.3, "mean", torch.float64, torch.float64, None, 2.0, 3.0)
    loss = transforms.reference(Heads(**tensors), options)
    caps = {"student_softcap": 2.0, "teacher_softcap": 3.0}
    torch.testing.assert_close(loss, dense(inputs, divergence, temperature=1.3, **caps))
    torch.testing.assert_close(transforms.distillation(Heads(**tensors), options), loss)
    assert autograd.distillation(Heads(**tensors), options).isfinite()


def test_a_tied_student_gets_its_gradient_once(device):
    """One tensor is both input and weight, also where the gradient is differentiated."""
    from lowtide.distillation import forward_kl

    student = torch.randn(5, 5, dtype=torch.float64, device=device, requires_grad=True)
    teacher = torch.randn(5, 5, dtype=torch.float64, device=device)
    (plain,) = torch.autograd.grad(forward_kl(student, student, teacher, teacher), student)
    (again,) = torch.autograd.grad(forward_kl(student, student, teacher, teacher), student, create_graph=True)
    torch.testing.assert_close(again.detach(), plain, rtol=1e-12, atol=1e-12)
