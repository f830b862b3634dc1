"""Derivatives of higher order, torch.func, forward mode; recomputed, saved elsewhere, cast, captured."""

import contextlib
import copy
import io
import pickle
from dataclasses import replace

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import lowtide
from tests.helpers import (
    Inputs,
    check,
    dense,
    dense_log_probs,
    differentiate,
    fused,
    fused_log_probs,
    make_inputs,
    no_synchronisation,
)

# Of torch.jit, which torch.func.jvp imports.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

REDUCTIONS = ("mean", "sum", "none")

# What make_inputs is asked for, and what the call is asked for.
KINDS = {
    "plain": ({}, {}),
    "all, classes": (
        {"logit_scale": True, "bias": True, "class_weight": True},
        {"softcap": 1.5, "z_loss": 0.3, "label_smoothing": 0.1},
    ),
    "all, probabilities": (
        {"logit_scale": True, "bias": True, "class_weight": True, "probabilities": True},
        {"softcap": 1.5, "z_loss": 0.3, "label_smoothing": 0.1},
    ),
}


def small(device, kind, *, dtype=torch.float64, **more):
    made, options = KINDS[kind]
    return make_inputs(5, 3, 4, device=device, dtype=dtype, **made, **more), options


def loss_of_leaves(inputs, loss_of=fused, **options):
    """A function of the leaves' values, in their order, and those values."""
    names = list(inputs.leaves())

    def loss(*leaves):
        return loss_of(replace(inputs, **dict(zip(names, leaves))), **options)

    return loss, tuple(leaf.detach() for leaf in inputs.leaves().values())


def assert_close(found, expected):
    """In float64, beside a few roundings."""
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


# Order.


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_derivatives_of_first_and_second_order(device, reduction, kind, backend):
    """Against finite differences, and backward mode against forward mode."""
    inputs, options = small(device, kind)
    loss, values = loss_of_leaves(inputs, reduction=reduction, backend=backend, **options)
    leaves = tuple(value.requires_grad_() for value in values)
    assert torch.autograd.gradcheck(loss, leaves, fast_mode=True, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(loss, leaves, fast_mode=True)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_derivatives_for_probabilities_and_class_weights(device, reduction):
    inputs, options = small(device, "all, probabilities")
    inputs.target.requires_grad_(), inputs.weight.requires_grad_()
    loss, values = loss_of_leaves(inputs, reduction=reduction, **options)
    leaves = tuple(value.requires_grad_() for value in values)
    assert len(leaves) == 6
    assert torch.autograd.gradcheck(loss, leaves, fast_mode=True, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(loss, leaves, fast_mode=True)


@pytest.mark.parametrize("result", [0, 1, 2])
def test_derivatives_of_log_probs(device, result):
    inputs, _ = small(device, "plain", bias=True, logit_scale=True)

    def of_one(inputs):
        return fused_log_probs(inputs, softcap=1.5)[result]

    loss, values = loss_of_leaves(inputs, of_one)
    leaves = tuple(value.requires_grad_() for value in values)
    assert torch.autograd.gradcheck(loss, leaves, fast_mode=True, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(loss, leaves, fast_mode=True)


@pytest.mark.parametrize("workspace", [None, "few"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_penalty_on_gradients(device, reduction, kind, workspace):
    """create_graph, and the ordinary backward of what comes out, whatever the chunks."""
    made, options = KINDS[kind]
    inputs = make_inputs(device=device, dtype=torch.float64, **made)
    leaves = tuple(inputs.leaves().values())
    found = []
    for loss_of, own in ((fused, {"workspace": workspace and 100_000}), (dense, {})):
        loss = loss_of(inputs, reduction=reduction, **own, **options).sum()
        gradients = torch.autograd.grad(loss, leaves, create_graph=True)
        total = loss + sum(gradient.square().sum() for gradient in gradients)
        found.append(torch.autograd.grad(total, leaves))
    assert_close(*found)


def test_a_graph_of_a_graph_backward_twice(device):
    """What create_graph gives may be differentiated again, and the first gradients stay as they were."""
    inputs = make_inputs(device=device, dtype=torch.float64)
    plain = differentiate(fused, inputs)
    loss = fused(inputs)
    (first,) = torch.autograd.grad(loss, inputs.input, create_graph=True)
    before = first.detach().clone()
    seconds = [
        torch.autograd.grad(first.square().sum(), inputs.linear_weight, retain_graph=True)[0]
        for _ in range(2)
    ]
    assert torch.equal(*seconds)
    assert torch.equal(first.detach(), before)
    (again,) = torch.autograd.grad(loss, inputs.input)
    assert_close((before, again), (plain["input"],) * 2)


# torch.func.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("transform", ["grad", "vjp", "jvp", "jacrev", "jacfwd", "hessian"])
def test_torch_func(device, transform, reduction, kind):
    inputs, options = small(device, kind)

    def run(loss_of):
        loss, values = loss_of_leaves(inputs, loss_of, reduction=reduction, **options)
        places = tuple(range(len(values)))
        tangents = tuple(
            torch.linspace(-1, 1, value.numel(), device=device).double().view_as(value) for value in values
        )
        if transform == "grad":
            return torch.func.grad(lambda *leaves: loss(*leaves).sum(), places)(*values)
        if transform == "vjp":
            out, pull = torch.func.vjp(loss, *values)
            return out, *pull(torch.linspace(-1, 1, out.numel(), device=device).double().view_as(out))
        if transform == "jvp":
            return torch.func.jvp(loss, values, tangents)
        if transform in ("jacrev", "jacfwd"):
            return getattr(torch.func, transform)(loss, places)(*values)
        hessian = torch.func.hessian(lambda *leaves: loss(*leaves).sum(), (0, 1))(*values)
        return [block for row in hessian for block in row]

    assert_close(run(fused), run(dense))


@pytest.mark.parametrize("transform", ["vmap", "vmap of grad", "grad of vmap", "vmap of vmap"])
@pytest.mark.parametrize("batched", ["input", "input and target", "weight", "scale", "target"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_vmap(device, reduction, batched, transform):
    """Over a batch of some arguments: one call after the other."""
    B, inputs = 3, make_inputs(5, 3, 4, device=device, dtype=torch.float64, bias=True, logit_scale=True)
    shape = (B, B) if transform == "vmap of vmap" else (B,)
    names = {"input": ["input"], "input and target": ["input", "target"], "weight": ["linear_weight"]}
    names = names.get(batched, [{"scale": "logit_scale"}.get(batched, batched)])
    batch = {name: _varied(getattr(inputs, name), shape) for name in names}
    if "grad" in transform and names == ["target"]:
        pytest.skip("a class has no gradient")

    def loss(*values):
        changed = replace(inputs, **dict(zip(names, values)))
        fixed = {name: leaf.detach() for name, leaf in changed.leaves().items() if name not in names}
        return fused(replace(changed, **fixed), reduction=reduction, softcap=2.0)

    def total(*values):
        return loss(*values).sum()

    run, one = {
        "vmap": (torch.vmap(loss), loss),
        "vmap of grad": (torch.vmap(torch.func.grad(total)), torch.func.grad(total)),
        "grad of vmap": (
            torch.func.grad(lambda *values: torch.vmap(total)(*values).sum()),
            torch.func.grad(total),
        ),
        "vmap of vmap": (torch.vmap(torch.vmap(loss)), loss),
    }[transform]
    found = run(*batch.values())
    places = [(i, j) for i in range(B) for j in range(B)] if len(shape) == 2 else [(i,) for i in range(B)]
    expected = torch.stack([one(*(value[place] for value in batch.values())) for place in places])
    assert_close([found], [expected.view_as(found)])


def _varied(tensor, shape):
    if not tensor.is_floating_point():
        return torch.stack([tensor.roll(k) for k in range(torch.Size(shape).numel())]).view(
            *shape, *tensor.shape
        )
    return tensor.detach() + torch.randn(*shape, *tensor.shape, dtype=tensor.dtype, device=tensor.device)


def test_gradients_of_each_sample(device):
    """vmap(grad), as differential privacy uses it: one gradient of the weight for each row."""
    inputs = make_inputs(5, 3, 4, device=device, dtype=torch.float64, ignored=0.0)
    weight = inputs.linear_weight.detach()

    def loss(weight, x_D, target):
        return lowtide.linear_cross_entropy(x_D, weight, target)

    found = torch.vmap(torch.func.grad(loss), (None, 0, 0))(weight, inputs.input.detach(), inputs.target)
    rows = dense(inputs, reduction="none")
    expected = [torch.autograd.grad(row, inputs.linear_weight, retain_graph=True)[0] for row in rows]
    assert_close(found, expected)


def test_vmap_of_log_probs(device):
    inputs = make_inputs(6, 3, 4, device=device, dtype=torch.float64)
    x, w, target = (
        inputs.input.detach().view(2, 3, 3),
        inputs.linear_weight.detach(),
        inputs.target.view(2, 3),
    )
    found = torch.vmap(lambda x, target: tuple(lowtide.linear_log_probs(x, w, target)))(x, target)
    expected = [part.view(2, 3) for part in dense_log_probs(inputs)]
    assert_close(found, expected)
    assert torch.equal(found[3], expected[3])


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_batched_gradients(device, reduction):
    inputs = make_inputs(5, 3, 4, device=device, dtype=torch.float64, bias=True)
    leaves = tuple(inputs.leaves().values())
    found = []
    for loss_of in (fused, dense):
        loss = loss_of(inputs, reduction=reduction)
        seeds = torch.eye(max(1, loss.numel()), dtype=loss.dtype, device=device).view(-1, *loss.shape)
        found.append(torch.autograd.grad(loss, leaves, seeds, is_grads_batched=True))
    assert_close(*found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_forward_mode(device, reduction, kind):
    inputs, options = small(device, kind)
    found = []
    for loss_of in (fused, dense):
        with forward_ad.dual_level():
            duals = {
                name: forward_ad.make_dual(leaf.detach(), leaf.detach().cos())
                for name, leaf in inputs.leaves().items()
            }
            loss = loss_of(replace(inputs, **duals), reduction=reduction, **options)
            found.append(forward_ad.unpack_dual(loss))
    assert found[0].tangent is not None
    assert_close(*found)


def test_forward_over_backward(device):
    """A product of the Hessian and a vector, by either order of modes."""
    inputs = make_inputs(5, 3, 4, device=device, dtype=torch.float64)
    loss, (x, w) = loss_of_leaves(inputs)
    vectors = (torch.randn_like(x), torch.randn_like(w))
    _, forward = torch.func.jvp(torch.func.grad(loss, (0, 1)), (x, w), vectors)

    def slope(x, w):
        return torch.func.jvp(loss, (x, w), vectors)[1]

    backward = torch.func.grad(slope, (0, 1))(x, w)
    exact_loss, _ = loss_of_leaves(inputs, dense)
    _, expected = torch.func.jvp(torch.func.grad(exact_loss, (0, 1)), (x, w), vectors)
    assert_close(forward, expected)
    assert_close(backward, expected)


def test_functional_call(device):
    """torch.func's way to train a module."""
    criterion = lowtide.LinearCrossEntropyLoss(3, 4, bias=True, device=device, dtype=torch.float64)
    hidden, target = torch.randn(5, 3, device=device).double(), torch.randint(4, (5,), device=device)
    parameters = {name: parameter.detach() for name, parameter in criterion.named_parameters()}

    def loss(parameters):
        return torch.func.functional_call(criterion, parameters, (hidden, target))

    found = torch.func.grad(loss)(parameters)
    expected = torch.autograd.grad(criterion(hidden, target), list(criterion.parameters()))
    assert_close(found.values(), expected)


# Recomputed, saved elsewhere, cast, captured, copied.


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("kind", ["all, classes", "all, probabilities"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_activation_checkpointing(device, reduction, kind, use_reentrant):
    made, options = KINDS[kind]
    inputs = make_inputs(device=device, **made)
    loss, _ = loss_of_leaves(inputs, reduction=reduction, **options)
    leaves = inputs.leaves()
    plain = differentiate(fused, inputs, 0.3, reduction=reduction, **options)
    value = checkpoint(loss, *leaves.values(), use_reentrant=use_reentrant)
    value.backward(torch.full_like(value, 0.3))
    assert torch.equal(value.detach(), plain["loss"])
    for name, leaf in leaves.items():
        assert torch.equal(leaf.grad, plain[name]), name


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_of_log_probs(device, use_reentrant):
    inputs = make_inputs(device=device)

    def total(x, w):
        found = fused_log_probs(replace(inputs, input=x, linear_weight=w))
        return (found.log_prob + 0.1 * found.entropy + found.logsumexp).sum()

    leaves = (inputs.input, inputs.linear_weight)
    plain = torch.autograd.grad(total(*leaves), leaves)
    checkpoint(total, *leaves, use_reentrant=use_reentrant).backward()
    for leaf, expected in zip(leaves, plain):
        assert torch.equal(leaf.grad, expected)


class _Count(torch.utils._python_dispatch.TorchDispatchMode):
    """How often each operator of ours runs."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "lowtide":
            name = function.name().removeprefix("lowtide::")
            self.calls[name] = self.calls.get(name, 0) + 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_selective_checkpointing(device, reduction, keep):
    """By the operator's name: what is kept does not run again."""
    inputs = make_inputs(device=device, bias=True)
    plain = differentiate(fused, inputs, 0.3, reduction=reduction)
    op = torch.ops.lowtide.linear_cross_entropy.default

    def policy(context, function, *args, **kwargs):
        kept = keep and function is op
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def loss(*leaves):
        changed = replace(inputs, **dict(zip(inputs.leaves(), leaves)))
        return fused(replace(changed, input=changed.input * 1), reduction=reduction)

    with _Count() as count:
        value = checkpoint(
            loss,
            *inputs.leaves().values(),
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        )
        value.backward(torch.full_like(value, 0.3))
    assert count.calls["linear_cross_entropy"] == (1 if keep else 2)
    assert torch.equal(value.detach(), plain["loss"])
    for name, leaf in inputs.leaves().items():
        assert torch.equal(leaf.grad, plain[name]), name


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("retain", [False, True])
def test_what_is_saved_may_be_elsewhere(device, retain, reduction):
    """save_on_cpu, and hooks that give other tensors of the same values."""
    inputs = make_inputs(device=device, bias=True, logit_scale=True)
    leaves = tuple(inputs.leaves().values())
    plain = differentiate(fused, inputs, reduction=reduction)
    for hooks in (
        torch.autograd.graph.save_on_cpu(),
        torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.clone(), lambda saved: saved.clone()),
    ):
        with hooks:
            loss = fused(inputs, reduction=reduction)
        for again in range(1 + retain):
            keep = retain and not again
            found = torch.autograd.grad(loss, leaves, torch.ones_like(loss), retain_graph=keep)
            for name, gradient in zip(inputs.leaves(), found):
                assert torch.equal(gradient, plain[name]), name


def test_log_probs_saved_on_the_cpu(device):
    inputs = make_inputs(device=device)
    leaves = (inputs.input, inputs.linear_weight)
    plain = torch.autograd.grad(fused_log_probs(inputs).entropy.sum(), leaves)
    with torch.autograd.graph.save_on_cpu():
        entropy = fused_log_probs(inputs).entropy
    for found, expected in zip(torch.autograd.grad(entropy.sum(), leaves), plain):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("place", ["outside", "inside", "backward too"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_autocast(device, reduction, place, cast):
    """As if the operands had been cast (on the CPU, where products are in float32, as if they had not). The
    gradients have the parameters' own dtypes."""
    inputs = make_inputs(device=device, bias=True, logit_scale=True)
    with torch.no_grad():
        inputs.linear_bias.copy_(inputs.linear_bias.to(cast))
    rounded = replace(inputs.to(cast), logit_scale=inputs.logit_scale)
    same = rounded if device == "cuda" or place == "inside" else inputs
    expected = differentiate(fused, same, 0.3, reduction=reduction)

    def loss_of(inputs, **options):
        with torch.autocast(device, dtype=cast):
            return fused(inputs, **options)

    if place == "outside":
        found = differentiate(loss_of, inputs, 0.3, reduction=reduction)
    elif place == "backward too":
        with torch.autocast(device, dtype=cast):
            found = differentiate(fused, inputs, 0.3, reduction=reduction)
    else:
        # Tensors that autocast has made, in code that autocast has left.
        with torch.autocast(device, dtype=cast), torch.autocast(device, enabled=False):
            found = differentiate(fused, rounded, 0.3, reduction=reduction)
    assert found["loss"].dtype == torch.float32
    torch.testing.assert_close(found["loss"], expected["loss"], rtol=1e-6, atol=1e-6)
    for name, leaf in (rounded if place == "inside" else inputs).leaves().items():
        assert found[name].dtype == leaf.dtype, name
        scale = expected[name].float().abs().max().item()
        eps = torch.finfo(cast).eps
        torch.testing.assert_close(found[name].float(), expected[name].float(), rtol=eps, atol=eps * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_cuda_graph(device, reduction, dtype):
    """Captured once, forward and backward, and played for other data in the same memory."""
    if device == "cpu":
        pytest.skip("needs CUDA graphs")
    inputs = make_inputs(device=device, dtype=dtype, bias=True, logit_scale=True)
    leaves = tuple(inputs.leaves().values())

    def step():
        loss = fused(inputs, reduction=reduction, softcap=3.0, z_loss=0.1)
        return loss.detach(), *torch.autograd.grad(loss.sum(), leaves)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (1, 2):
        torch.manual_seed(seed)
        other = make_inputs(device=device, dtype=dtype, bias=True, logit_scale=True)
        with torch.no_grad():
            inputs.target.copy_(other.target)
            for leaf, new in zip(leaves, other.leaves().values()):
                leaf.copy_(new)
        graph.replay()
        for found, expected in zip(captured, step()):
            assert torch.equal(found, expected)


def test_nothing_waits_for_the_device(device):
    for kind in KINDS:
        made, options = KINDS[kind]
        inputs = make_inputs(device=device, **made)
        for reduction in REDUCTIONS:
            upstream = torch.ones((37,) if reduction == "none" else (), device=device)
            differentiate(fused, inputs, upstream, reduction=reduction, **options)
            with no_synchronisation(device):
                result = differentiate(fused, inputs, upstream, reduction=reduction, **options)
            check(result, inputs, reduction=reduction, **options)


def saved(criterion):
    buffer = io.BytesIO()
    torch.save(criterion, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module)), saved])
@pytest.mark.parametrize("out_features", [(), (2, 3)])
def test_copies_of_the_module(device, out_features, way):
    """With every option, after it has run; the copy trains by itself."""
    criterion = lowtide.LinearCrossEntropyLoss(
        8, 7, out_features=out_features, bias=True, weight=torch.rand(7), label_smoothing=0.1, softcap=3.0,
        logit_scale=0.5, z_loss=0.1, ignore_index=2, reduction="sum", device="cpu",
    ).to(device)  # fmt: skip
    hidden, target = torch.randn(5, 8, device=device), torch.randint(7, (5, *out_features), device=device)
    expected = criterion(hidden, target)
    expected.backward()
    other = way(criterion)
    found = other(hidden, target)
    assert torch.equal(found, expected)
    other.zero_grad()
    found.backward()
    for theirs, ours in zip(criterion.parameters(), other.parameters()):
        assert torch.equal(theirs.grad, ours.grad)
        assert theirs.data_ptr() != ours.data_ptr()


def test_threads(device):
    """Backward in another thread than forward, which sees none of its modes."""
    import threading

    inputs = make_inputs(device=device)
    expected = differentiate(fused, inputs)
    loss, found = fused(inputs), []
    leaves = (inputs.input, inputs.linear_weight)
    with torch.no_grad(), contextlib.suppress(RuntimeError):
        thread = threading.Thread(target=lambda: found.extend(torch.autograd.grad(loss, leaves)))
        thread.start()
        thread.join()
    for gradient, leaf in zip(found, ("input", "linear_weight"), strict=True):
        assert torch.equal(gradient, expected[leaf])


def test_inside_a_custom_function(device):
    """Called with gradients on in the forward of another Function, as chunked training code does."""

    class Outer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            with torch.enable_grad():
                leaves = (x.detach().requires_grad_(), w.detach().requires_grad_())
                loss = fused(Inputs(*leaves, inputs.target))
                ctx.save_for_backward(*torch.autograd.grad(loss, leaves))
            return loss.detach()

        @staticmethod
        def backward(ctx, upstream):
            return tuple(upstream * gradient for gradient in ctx.saved_tensors)

    inputs = make_inputs(device=device)
    loss = Outer.apply(inputs.input, inputs.linear_weight)
    found = torch.autograd.grad(loss, (inputs.input, inputs.linear_weight))
    expected = differentiate(fused, inputs)
    for gradient, name in zip(found, ("input", "linear_weight")):
        assert torch.equal(gradient, expected[name])
