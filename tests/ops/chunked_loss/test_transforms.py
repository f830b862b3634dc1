"""torch.func, forward mode, and derivatives of higher order: exact, a chunk at a time."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad

from lowtide.memory import peak_memory
from tests.ops.chunked_loss.helpers import (
    HEADS,
    MODES,
    B,
    D,
    T,
    V,
    cast,
    chunked_loss,
    close,
    cross_entropy,
    dense,
    leaves,
    make,
    per_row,
    roundings_of,
)

# torch.func.jvp imports torch.jit, which warns that it is deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

chunked = functools.partial(chunked_loss, chunk_size=5)


def functional(loss_of, head, labels, mode="gradient_in_forward", loss_fn=cross_entropy):
    """Return the loss as a function of hidden states and the head's parameters, and these."""
    options = {"mode": mode} if loss_of is chunked else {}

    def loss(hidden, parameters):
        own = functools.partial(torch.func.functional_call, head, parameters)
        return loss_of(loss_fn, lambda h: own((h,)), hidden, labels)

    def unbroken(hidden, parameters):
        own = functools.partial(called, head, parameters)
        return loss_of(loss_fn, own, hidden, labels, **options)

    return loss if loss_of is dense else unbroken


def called(head, parameters, hidden):
    return torch.func.functional_call(head, parameters, (hidden,))


def values(head, hidden):
    return hidden.detach(), {name: each.detach() for name, each in head.named_parameters()}


def flat(found):
    return [each for each in torch.utils._pytree.tree_leaves(found) if isinstance(each, torch.Tensor)]


def tangents_of(hidden, parameters):
    return torch.randn_like(hidden), {name: torch.randn_like(each) for name, each in parameters.items()}


TRANSFORMS = {
    "grad": lambda loss, h, p, _: torch.func.grad(loss, (0, 1))(h, p),
    "grad and value": lambda loss, h, p, _: torch.func.grad_and_value(loss, (0, 1))(h, p),
    "vjp": lambda loss, h, p, _: torch.func.vjp(loss, h, p)[1](torch.full((), -0.7).to(h)),
    "jvp": lambda loss, h, p, moved: torch.func.jvp(loss, (h, p), moved),
    "jacrev": lambda loss, h, p, _: torch.func.jacrev(loss, (0, 1))(h, p),
    "jacfwd": lambda loss, h, p, _: torch.func.jacfwd(loss, 1)(h, p),
    "grad of grad": lambda loss, h, p, _: torch.func.grad(
        lambda h: sum(each.square().sum() for each in torch.func.grad(loss, 1)(h, p).values())
    )(h),
    "grad of jvp": lambda loss, h, p, moved: torch.func.grad(
        lambda h: torch.func.jvp(lambda p: loss(h, p), (p,), moved[1:])[1]
    )(h),
    "jvp of grad": lambda loss, h, p, moved: torch.func.jvp(torch.func.grad(loss, (0, 1)), (h, p), moved),
}


def both(transform, head, hidden, labels, **options):
    directions = tangents_of(*values(head, hidden))

    def run(loss_of, head, hidden):
        moved = torch.utils._pytree.tree_map(lambda each: each.to(hidden.dtype), directions)
        loss = functional(loss_of, head, labels, **options)
        return flat(transform(loss, *values(head, hidden), moved))

    exact = run(dense, head, hidden)
    roundings = roundings_of(run(dense, *cast(head, hidden, torch.float32)), exact)
    close(run(chunked, head, hidden), exact, roundings=roundings)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms(device, transform, mode):
    both(TRANSFORMS[transform], *make(device=device), mode=mode)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("transform", ["grad", "jvp", "jvp of grad"])
def test_transforms_of_any_head(device, transform, kind):
    both(TRANSFORMS[transform], *make(kind, device=device))


def test_hessian(device):
    head = nn.Linear(D, 4, bias=False).to(device, torch.float64)
    hidden = torch.randn(1, 7, D, dtype=torch.float64, device=device)
    labels = torch.randint(4, (1, 7), device=device)
    both(lambda loss, h, p, _: torch.func.hessian(loss, 1)(h, p), head, hidden, labels)


@pytest.mark.parametrize("transform", ["vjp", "jvp", "jacrev"])
def test_transforms_value_per_row(device, transform):
    head, hidden, labels = make(device=device)
    cotangent = torch.randn(B, T, dtype=torch.float64, device=device)
    transforms = TRANSFORMS | {"vjp": lambda loss, h, p, _: torch.func.vjp(loss, h, p)[1](cotangent.to(h))}
    both(transforms[transform], head, hidden, labels, mode="recompute", loss_fn=per_row)


def over(loss_of, head, mode):
    """Return the loss of one batch element as a function of hidden states, labels, parameters."""

    def loss(hidden, labels, parameters):
        return functional(loss_of, head, labels, mode)(hidden, parameters)

    return loss


VMAPS = {
    "vmap": lambda loss, *at: torch.vmap(loss, (0, 0, None))(*at),
    "vmap of grad": lambda loss, *at: torch.vmap(torch.func.grad(loss, (0, 2)), (0, 0, None))(*at),
    "grad of vmap": lambda loss, h, y, p: torch.func.grad(
        lambda p: torch.vmap(loss, (0, 0, None))(h, y, p).square().sum()
    )(p),
    "vmap of jvp": lambda loss, h, y, p: torch.vmap(
        lambda h, y: torch.func.jvp(lambda h: loss(h, y, p), (h,), (h.cos(),))
    )(h, y),
    "vmap of vmap": lambda loss, h, y, p: torch.vmap(torch.vmap(loss, (0, 0, None)), (None, None, 0))(
        h, y, {name: torch.stack([each, 2 * each]) for name, each in p.items()}
    ),
    "ensemble": lambda loss, h, y, p: torch.vmap(torch.func.grad(loss, 2), (None, None, 0))(
        h[0], y[0], {name: torch.stack([each, 2 * each]) for name, each in p.items()}
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("transform", VMAPS)
def test_vmap(device, transform, mode):
    head, _, _ = make(device=device)
    hidden = torch.randn(3, 1, T, D, dtype=torch.float64, device=device)
    labels = torch.randint(V, (3, 1, T), device=device)
    parameters = values(head, hidden)[1]
    close(
        *(
            flat(VMAPS[transform](over(loss_of, head, mode), hidden, labels, parameters))
            for loss_of in (chunked, dense)
        )
    )


@pytest.mark.parametrize("mode", MODES)
def test_transforms_of_module(device, mode):
    """The loss is inside nn.Module.forward, and torch.func.functional_call is around the module."""

    class Model(nn.Module):
        def __init__(self, loss_of):
            super().__init__()
            self.trunk, self.head, self.loss_of = nn.Linear(D, D), HEADS["norm"](), loss_of

        def forward(self, x, labels):
            options = {"mode": mode} if self.loss_of is chunked else {}
            return self.loss_of(cross_entropy, self.head, self.trunk(x).tanh(), labels, **options)

    _, x, labels = make(device=device)
    model = Model(chunked).to(device, torch.float64)
    parameters = {name: each.detach() for name, each in model.named_parameters()}
    results = []
    for loss_of in (chunked, dense):
        model.loss_of = loss_of
        per_sample = torch.func.grad(lambda p, x, y: torch.func.functional_call(model, p, (x, y)) / 7)
        results.append(flat(torch.vmap(per_sample, (None, 0, 0))(parameters, x.detach(), labels)))
    close(*results)


@pytest.mark.parametrize("mode", MODES)
def test_forward_mode(device, mode):
    head, hidden, labels = make(device=device)
    directions = [torch.randn_like(each) for each in leaves(head, hidden)]
    results = []
    for loss_of in (chunked, dense):
        with forward_ad.dual_level():
            h, *p = (forward_ad.make_dual(each, d) for each, d in zip(leaves(head, hidden), directions))
            parameters = dict(zip((name for name, _ in head.named_parameters()), p))
            loss = functional(loss_of, head, labels, mode)(h, parameters)
            value, tangent = forward_ad.unpack_dual(loss / 3)
            results.append([value.detach(), tangent.detach()])
    close(*results)


@pytest.mark.parametrize("mode", MODES)
def test_finite_differences(mode):
    head, hidden, labels = make("linear")
    hidden = hidden.detach()[:, :3].requires_grad_()

    def loss(hidden, weight):
        linear = functools.partial(F.linear, weight=weight)
        return chunked_loss(cross_entropy, linear, hidden, labels[:, :3], chunk_size=2, mode=mode)

    assert torch.autograd.gradcheck(loss, (hidden, head.weight), check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(loss, (hidden, head.weight), fast_mode=True)
    assert torch.autograd.gradgradcheck(loss, (hidden, head.weight), fast_mode=True, check_fwd_over_rev=True)


@pytest.mark.parametrize("mode", MODES)
def test_transforms_aux(device, mode):
    head, hidden, labels = make(device=device)

    def loss_fn(logits, labels):
        right = logits.argmax(-1).eq(labels).sum()
        return cross_entropy(logits, labels), {"right": right, "rows": len(labels)}

    def with_aux(loss_of, **options):
        def loss(hidden, labels):
            return loss_of(loss_fn, head, hidden, labels, **options)

        return torch.vmap(torch.func.grad(loss, has_aux=True))(hidden.detach(), labels)

    found, aux = with_aux(chunked, has_aux=True, mode=mode)
    rows = [chunked(loss_fn, head, *row, has_aux=True) for row in zip(hidden, labels)]
    close(found, torch.autograd.grad(sum(loss for loss, _ in rows), hidden)[0])
    assert torch.equal(aux["right"], torch.stack([expected["right"] for _, expected in rows]))
    assert torch.equal(aux["rows"], torch.full((B,), T, device=device))


@pytest.mark.parametrize("mode", MODES)
def test_transforms_dropout_mask(device, mode):
    head = nn.Sequential(nn.Dropout(0.5), nn.Linear(D, V)).to(device, torch.float64)
    hidden = torch.randn(B, T, D, dtype=torch.float64, device=device)

    def loss(hidden):
        return chunked(torch.sum, head, hidden, mode=mode)

    gradient, value = torch.func.grad_and_value(loss)(hidden)
    bias = B * T * head[1].bias.sum()
    close([(gradient * hidden).sum() + bias], [value])  # linear in hidden states, the mask in its slope
    with pytest.raises(RuntimeError, match="randomness error mode"):
        torch.vmap(loss)(hidden)
    with pytest.raises(RuntimeError, match=r"draws once for all elements of the batch.*randomness='same'"):
        torch.vmap(loss, randomness="different")(hidden)
    gradients, losses = torch.vmap(torch.func.grad_and_value(loss), randomness="same")(hidden)
    close((gradients * hidden).sum((1, 2)) + bias / B, losses)
    assert torch.equal(gradients[0] == 0, gradients[1] == 0)


@pytest.mark.parametrize("mode", MODES)
def test_transforms_closure(mode):
    """A tensor in the closure of the head would silently get no derivative, so it is an error."""
    head, hidden, labels = make("linear")

    def reached(weight):
        return chunked(cross_entropy, lambda h: F.linear(h, weight), hidden.detach(), labels, mode=mode)

    weight = head.weight.detach()
    with pytest.raises(RuntimeError, match="through a closure"):
        torch.func.grad(reached)(weight)
    with pytest.raises(RuntimeError, match="through a closure"):
        torch.func.jvp(reached, (weight,), (weight,))
    with pytest.raises(RuntimeError, match="through a closure"):
        torch.vmap(reached)(weight[None])
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="through a closure"):
        reached(forward_ad.make_dual(weight, weight))
    outer = weight.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="through a closure"):
        torch.func.grad(lambda h: chunked(cross_entropy, lambda h: F.linear(h, outer), h, labels, mode=mode))(
            hidden.detach()
        )


def test_transforms_closure_of_later_chunk():
    head, hidden, labels = make("linear")

    def reached(weight):
        def loss_fn(logits, labels):
            return cross_entropy(logits if len(labels) == 5 else logits * weight.sum(), labels)

        return chunked_loss(loss_fn, head, hidden.detach(), labels, chunk_size=5)

    with pytest.raises(RuntimeError, match="through a closure"):
        torch.func.grad(reached)(head.weight.detach())


def test_transforms_workspace_not_measured():
    head, hidden, labels = make("linear")
    with pytest.raises(ValueError, match="give chunk_size"):
        torch.func.grad(lambda h: chunked_loss(cross_entropy, head, h, labels, workspace=2**20))(
            hidden.detach()
        )


def test_transforms_outer_graph(device):
    """Backward goes through a result of torch.func."""
    head, hidden, labels = make(device=device)
    results = []
    for loss_of in (chunked, dense):
        per_sample = torch.vmap(torch.func.grad(functools.partial(loss_of, cross_entropy, head)))
        penalty = per_sample(hidden, labels).square().sum()
        results.append(torch.autograd.grad(penalty, leaves(head, hidden)))
    close(*results)


@pytest.mark.parametrize("transform", ["grad", "jvp", "vmap of grad"])
def test_transforms_memory(device, transform):
    N, C, D, V = 512, 16, 8, 4096
    head = nn.Linear(D, V).to(device)
    hidden = torch.randn(2, N // 2, D, device=device)
    labels = torch.randint(V, (2, N // 2), device=device)

    def loss(hidden, labels):
        return chunked_loss(cross_entropy, head, hidden, labels, chunk_size=C)

    run = {
        "grad": lambda: torch.func.grad(loss)(hidden, labels),
        "jvp": lambda: torch.func.jvp(lambda h: loss(h, labels), (hidden,), (hidden,)),
        "vmap of grad": lambda: torch.vmap(torch.func.grad(loss))(hidden, labels),
    }[transform]
    run()
    with peak_memory(device) as peak:
        run()
    assert peak.bytes < N * V * 4 / 2
    assert peak.largest <= C * V * 4
