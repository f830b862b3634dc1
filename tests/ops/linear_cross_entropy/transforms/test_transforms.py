"""torch.func and forward mode, one within another."""

from dataclasses import replace

import pytest
import torch
from torch.autograd import forward_ad

import lowtide
from tests.ops.linear_cross_entropy.kinds import KINDS, REDUCTIONS, assert_close, loss_of_leaves, small
from tests.support.loss import (
    dense,
    dense_log_probs,
    fused,
    make_inputs,
)

# torch.func.jvp imports torch.jit, which warns that it is deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("batched", ["input", "weight", "target"])
def test_vmap_empty_batch(device, batched, reduction, kind):
    """Shapes and dtypes as from any other batch; torch's own composite fails at some of these."""
    inputs, options = small(device, kind)
    name = {"weight": "linear_weight"}.get(batched, batched)
    value = getattr(inputs, name).detach()
    fixed = replace(inputs, **{name: leaf.detach() for name, leaf in inputs.leaves().items()})

    def loss(value):
        return fused(replace(fixed, **{name: value}), reduction=reduction, **options)

    def gradient(value):
        return torch.func.grad(lambda value: loss(value).sum())(value)

    functions = [loss, torch.vmap(loss)] + [gradient, torch.func.jacfwd(loss)] * value.is_floating_point()
    for function in functions:
        one = value if function is not functions[1] else value[None]
        none, some = (torch.vmap(function)(one.expand(size, *one.shape)) for size in (0, 2))
        assert none.shape == (0, *some.shape[1:])
        assert none.dtype == some.dtype


def test_vmap_log_probs_empty_batch(device):
    inputs = make_inputs(6, 3, 4, device=device)
    w, target = inputs.linear_weight.detach(), inputs.target
    nothing = torch.ones(0, 6, 3, device=device)
    found = torch.vmap(lambda x: tuple(lowtide.linear_log_probs(x, w, target)))(nothing)
    assert [part.shape for part in found] == [(0, 6)] * 4
    assert [part.dtype for part in found] == [torch.float32] * 3 + [torch.int64]


def test_gradients_per_sample(device):
    """vmap(grad), as differential privacy uses it: one gradient of the weight for each row."""
    inputs = make_inputs(5, 3, 4, device=device, dtype=torch.float64, ignored=0.0)
    weight = inputs.linear_weight.detach()

    def loss(weight, x_D, target):
        return lowtide.linear_cross_entropy(x_D, weight, target)

    found = torch.vmap(torch.func.grad(loss), (None, 0, 0))(weight, inputs.input.detach(), inputs.target)
    rows = dense(inputs, reduction="none")
    expected = [torch.autograd.grad(row, inputs.linear_weight, retain_graph=True)[0] for row in rows]
    assert_close(found, expected)


def test_vmap_log_probs(device):
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
