"""Heads that differentiate on their own: in both passes, by transforms, forward mode, hooks."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from tests.ops.chunked_loss.helpers import (
    MODES,
    B,
    D,
    T,
    V,
    check,
    chunked_loss,
    close,
    cross_entropy,
    dense,
    leaves,
    make,
)


class Energy(nn.Module):
    """Logits from the slope of an energy: a head that asks for gradients itself."""

    def __init__(self, create_graph):
        super().__init__()
        self.inner, self.outer = nn.Linear(D, 3), nn.Linear(D, V)
        self.create_graph = create_graph

    def forward(self, hidden):
        with torch.enable_grad():
            inner = hidden if hidden.requires_grad else hidden.detach().requires_grad_()
            energy = self.inner(inner).tanh().square().sum()
            (slope,) = torch.autograd.grad(energy, inner, create_graph=self.create_graph)
        return self.outer(hidden + slope) * self.inner(hidden).sum(1, keepdim=True)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("create_graph", [True, False])
def test_head_calls_grad(device, create_graph, mode):
    _, hidden, labels = make(device=device)
    check(Energy(create_graph).to(device, torch.float64), hidden, labels, mode=mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("transform", ["vmap", "vmap of grad"])
def test_head_uses_transforms(device, transform, mode):
    head, hidden, labels = make("linear", device=device)

    def rows(module, hidden):
        if transform == "vmap":
            return torch.vmap(module)(hidden)
        slope = torch.vmap(torch.func.grad(lambda h: module(h).tanh().square().sum()))(hidden)
        return module(hidden + slope)

    check(partial(rows, head), hidden, labels, mode=mode, of=leaves(head, hidden))


class Equilibrium(nn.Module):
    """A fixed point whose gradient is one as well, found by a hook in backward."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(D, D), nn.Linear(D, V)

    def step(self, point, hidden):
        return 0.3 * torch.tanh(self.inner(point)) + hidden

    def forward(self, hidden):
        point = torch.zeros_like(hidden)
        with torch.no_grad():
            for _ in range(40):
                point = self.step(point, hidden)
        last = point.requires_grad_()
        image = self.step(last, hidden.detach())
        point = self.step(point.detach(), hidden)

        def solve(upstream):
            pull = upstream
            for _ in range(40):
                pull = upstream + torch.autograd.grad(image, last, pull, retain_graph=True)[0]
            return pull

        point.register_hook(solve)
        return self.outer(point)


class Offloaded(torch.autograd.Function):
    """A checkpoint whose backward runs a backward pass of its own, into .grad."""

    @staticmethod
    def forward(ctx, function, hidden):
        ctx.function = function
        ctx.save_for_backward(hidden)
        return function(hidden)

    @staticmethod
    def backward(ctx, upstream):
        own = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.function(own), upstream)
        return None, own.grad


@pytest.mark.parametrize("mode", MODES)
def test_backward_within_backward(device, mode):
    _, hidden, labels = make(device=device)
    head = Equilibrium().to(device, torch.float64)
    check(head, hidden, labels, mode=mode, of=leaves(head, hidden))


@pytest.mark.parametrize("mode", MODES)
def test_backward_into_grad_within_backward(device, mode):
    head, hidden, labels = make("norm", device=device)

    def offloaded(module, hidden):
        return Offloaded.apply(module, hidden) + module.linear(hidden)

    results = []
    for loss_of in (dense, chunked_loss):
        options = {} if loss_of is dense else {"chunk_size": 5, "mode": mode}
        loss_of(cross_entropy, partial(offloaded, head), hidden, labels, **options).backward()
        results.append([each.grad for each in leaves(head, hidden)])
        for each in leaves(head, hidden):
            each.grad = None
    close(*results)


class Hooked(nn.Linear):
    """Halves its weight's and its bias's gradients by hooks of its own."""

    def forward(self, hidden):
        handles = [each.register_hook(lambda gradient: gradient / 2) for each in (self.weight, self.bias)]
        found = super().forward(hidden)
        self.handles = [*getattr(self, "handles", []), *handles]
        return found


@pytest.mark.parametrize("mode", MODES)
def test_head_hooks_parameters(device, mode):
    _, hidden, labels = make(device=device)
    results = []
    head = Hooked(D, V).to(device, torch.float64)
    loss = chunked_loss(cross_entropy, head, hidden, labels, chunk_size=B * T, mode=mode)
    results.append(torch.autograd.grad(loss, leaves(head, hidden)))
    loss = dense(cross_entropy, head, hidden, labels)
    results.append(torch.autograd.grad(loss, leaves(head, hidden)))
    close(*results)


@pytest.mark.parametrize("mode", MODES)
def test_head_uses_forward_mode(device, mode):
    head, hidden, labels = make("linear", device=device)

    def moved(module, hidden):
        with forward_ad.dual_level():
            dual = module(forward_ad.make_dual(hidden, torch.ones_like(hidden)))
            return sum(forward_ad.unpack_dual(dual))

    check(partial(moved, head), hidden, labels, mode=mode, of=leaves(head, hidden))
