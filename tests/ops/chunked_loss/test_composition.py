"""Beside the rest of torch: dropout, checkpointing, hooks on saved tensors."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

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
    gradients,
    leaves,
    make,
)

# Randomness.


class Dropped(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.linear = nn.Linear(D, V).to(device, torch.float64)
        self.drop = nn.Dropout(0.5)

    def forward(self, hidden):
        return self.linear(self.drop(hidden))


@pytest.mark.parametrize("mode", MODES)
def test_dropout_mask_of_forward(device, mode):
    """The loss is linear in the weight where it is a sum of logits: its gradient has the mask."""
    head = Dropped(device)
    hidden = torch.randn(B, T, D, dtype=torch.float64, device=device, requires_grad=True)
    loss = chunked_loss(torch.sum, head, hidden, chunk_size=5, mode=mode)
    before = torch.get_rng_state(), torch.cuda.get_rng_state() if device == "cuda" else None
    for _ in range(2):
        grad_hidden, grad_weight = torch.autograd.grad(loss, [hidden, head.linear.weight], retain_graph=True)
        mask = grad_hidden / head.linear.weight.sum(0)
        close([mask.abs().sum()], [2.0 * mask.detach().gt(0.5).sum().double()])
        close([grad_weight[0]], [(mask * hidden).sum((0, 1)).detach()])
        close([loss.detach()], [((mask * hidden) @ head.linear.weight.t() + head.linear.bias).sum().detach()])
    create_graph = torch.autograd.grad(loss, [hidden], create_graph=True)
    close([create_graph[0].detach()], [grad_hidden])
    assert torch.equal(before[0], torch.get_rng_state()), "the generator went on from where it was"
    if device == "cuda":
        assert torch.equal(before[1], torch.cuda.get_rng_state())
    torch.autograd.grad(loss, [hidden])


def test_dropout_mask_per_chunk(device):
    head = Dropped(device)
    hidden = torch.ones(2, 64, D, dtype=torch.float64, device=device, requires_grad=True)
    loss = chunked_loss(torch.sum, head, hidden, chunk_size=64)
    (gradient,) = torch.autograd.grad(loss, hidden)
    assert not torch.equal(gradient[0], gradient[1])


# Checkpointing and hooks on saved tensors.


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_outside(device, use_reentrant, mode):
    head, hidden, labels = make(device=device)
    trunk = nn.Linear(D, D).to(device, torch.float64)

    def run(hidden, loss_of):
        return loss_of(cross_entropy, head, trunk(hidden).tanh(), labels, chunk_size=5, mode=mode)

    expected = torch.autograd.grad(run(hidden, dense) * 3, [*leaves(head, hidden), *trunk.parameters()])
    loss = checkpoint(run, hidden, chunked_loss, use_reentrant=use_reentrant) * 3
    loss.backward()
    close([each.grad for each in (*leaves(head, hidden), *trunk.parameters())], expected)


@pytest.mark.parametrize("mode", MODES)
def test_checkpointing_inside_head(device, mode):
    head, hidden, labels = make("two layers", device=device)

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.drop = head, nn.Dropout(0.0)

        def forward(self, hidden):
            return checkpoint(self.head, hidden, use_reentrant=False)

    check(Checkpointed(), hidden, labels, lambda loss: loss / 3, mode=mode)


@pytest.mark.parametrize("mode", MODES)
def test_saved_tensor_hooks_once(device, mode):
    """Offloading for what waits for backward; nothing of a chunk is packed."""
    head, hidden, labels = make(device=device)
    expected = gradients(dense, head, hidden, labels)
    packed = []

    def pack(tensor):
        packed.append(tensor.shape)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = chunked_loss(cross_entropy, head, hidden, labels, chunk_size=5, mode=mode)
    assert not any(shape[-1:] == (V,) and shape[0] == 5 for shape in packed if shape)
    close(torch.autograd.grad(loss / 18, leaves(head, hidden)), expected)


def test_saved_tensor_changed_in_place(device):
    class Wrong(nn.Linear):
        def forward(self, hidden):
            squashed = super().forward(hidden).tanh()
            squashed.detach().mul_(2)
            return squashed

    _, hidden, labels = make(device=device, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        chunked_loss(cross_entropy, Wrong(D, V).to(device), hidden, labels)
