"""Leaves that head or loss_fn make to differentiate by them: forces, gradient penalties."""

import threading
from functools import partial

import pytest
import torch
from torch import nn

from tests.ops.chunked_loss.helpers import MODES, chunked_loss, close

N = 11


class Forces(nn.Module):
    """An energy of positions and its forces, as models of molecules compute them."""

    def __init__(self, keep=lambda own: None):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 16), nn.Softplus(), nn.Linear(16, 1))
        self.keep = keep

    def forward(self, positions):
        with torch.enable_grad():
            own = positions.detach().requires_grad_()
            energy = self.net(own).squeeze(-1)
            (slope,) = torch.autograd.grad(energy.sum(), own, create_graph=True)
        self.keep(own)
        return {"energy": energy, "forces": -slope, "positions": own}


def loss_fn(out, energy, forces):
    return (out["energy"] - energy).square().sum() + (out["forces"] - forces).square().sum()


def make(device, **options):
    head = Forces(**options).to(device, torch.float64)
    rows = [torch.randn(N, size, dtype=torch.float64, device=device) for size in (3, 1, 3)]
    return head, rows[0], rows[1].squeeze(1), rows[2]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunk_size", [1, 4, N])
def test_forces(device, mode, chunk_size):
    head, *rows = make(device)
    parameters = list(head.parameters())
    want = torch.autograd.grad(loss_fn(head(rows[0]), *rows[1:]), parameters[:-1])
    loss = chunked_loss(loss_fn, head, *rows, chunk_size=chunk_size, mode=mode)
    close(torch.autograd.grad(loss, parameters[:-1], retain_graph=True), want)
    again = torch.autograd.grad(loss, parameters[:-1], create_graph=True)
    close([each.detach() for each in again], want)
    with torch.no_grad():
        close([chunked_loss(loss_fn, head, *rows, chunk_size=chunk_size, mode=mode)], [loss.detach()])


@pytest.mark.parametrize("mode", MODES)
def test_workspace(device, mode):
    head, *rows = make(device)
    parameters = list(head.parameters())
    want = torch.autograd.grad(loss_fn(head(rows[0]), *rows[1:]), parameters[:-1])
    loss = chunked_loss(loss_fn, head, *rows, workspace=4096, mode=mode)
    close(torch.autograd.grad(loss, parameters[:-1]), want)


@pytest.mark.parametrize("mode", MODES)
def test_leaf_in_a_cycle(device, mode):
    """It waits for the garbage collector, and nobody can ask for its gradient."""

    def cycle(own):
        ring = [own]
        ring.append(ring)

    head, *rows = make(device, keep=cycle)
    chunked_loss(loss_fn, head, *rows, chunk_size=4, mode=mode).backward()
    assert all(each.grad is not None for each in head.net[0].parameters())


@pytest.mark.parametrize("mode", MODES)
def test_leaf_in_another_thread(device, mode):
    """A thread of autograd may hold the last node of a chunk, and so its leaf, for a moment."""
    threads = []

    def hold(own):
        threads.append(threading.Timer(0.02, [own].clear))
        threads[-1].start()

    head, *rows = make(device, keep=hold)
    chunked_loss(loss_fn, head, *rows, chunk_size=4, mode=mode).backward()
    assert all(each.grad is not None for each in head.net[0].parameters())
    assert len(threads) >= 3
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("mode", MODES)
def test_gradient_penalty(device, mode):
    """The leaf is made of tensors that require gradients."""
    critic = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).to(device, torch.float64)
    real, fake = torch.randn(2, N, 3, dtype=torch.float64, device=device, requires_grad=True)

    def head(critic, real, fake):
        between = torch.lerp(real, fake, 0.3).detach().requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        return critic(real) + (slope.norm(dim=-1) - 1).square()[:, None]

    tensors = [real, fake, critic[0].weight, critic[2].weight]
    want = torch.autograd.grad(head(critic, real, fake).sum(), tensors, allow_unused=True)
    loss = chunked_loss(torch.sum, partial(head, critic), (real, fake), chunk_size=4, mode=mode)
    found = torch.autograd.grad(loss, tensors, allow_unused=True)
    assert found[1] is want[1] is None
    close([found[0], *found[2:]], [want[0], *want[2:]])


@pytest.mark.parametrize("mode", MODES)
def test_kept_leaf(device, mode):
    kept = []
    head, *rows = make(device, keep=kept.append)
    message = r"a closure or a global: a tensor of shape \[4, 3\], a tensor.*keep no tensor that they make"
    with pytest.raises(ValueError, match=message):
        chunked_loss(loss_fn, head, *rows, chunk_size=4, mode=mode)


@pytest.mark.parametrize("mode", MODES)
def test_leaf_beside_a_captured_parameter(device, mode):
    """The error names the parameter alone: the leaf is none that reaches the chunk."""
    head, *rows = make(device)
    scale = torch.ones((), dtype=torch.float64, device=device, requires_grad=True)
    with pytest.raises(ValueError, match="a global: scale would get none"):
        chunked_loss(lambda *call: loss_fn(*call) * scale, head, *rows, chunk_size=4, mode=mode)


@pytest.mark.parametrize("mode", MODES)
def test_parameter_without_a_name(mode):
    """No name in the code leads to it, nor does Python hold it: it is of a scripted module."""
    scripted = [[torch.jit.trace(nn.Linear(3, 2), torch.randn(1, 3))]]
    hidden = torch.randn(N, 3, requires_grad=True)
    with pytest.raises(ValueError, match=r"a tensor of shape \[2(, 3)?\]"):
        chunked_loss(lambda out: out.sum(), lambda hidden: scripted[0][0](hidden), hidden, mode=mode)
    assert scripted[0][0].weight.grad is None
