"""While a chunk runs, the copies of parameters pass for the parameters themselves."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lowtide.ops.chunked_loss import chunked_loss
from tests.ops.chunked_loss.helpers import MODES

N, D, V = 12, 6, 7
summed = partial(F.cross_entropy, reduction="sum")


class Scale(nn.Parameter):
    def of(self, tensor):
        return tensor * self


class Readout(nn.Linear):
    """Asks its parameters for their class, their attributes and their methods, as muP does."""

    def __init__(self):
        super().__init__(D, V, dtype=torch.float64)
        self.weight.width = 4.0
        self.scale = Scale(torch.tensor(1.5, dtype=torch.float64))
        self.bias.calls = 0

    def forward(self, hidden):
        assert isinstance(self.weight, nn.Parameter)
        assert type(self.weight) is nn.Parameter
        self.bias.calls += 1
        return self.scale.of(super().forward(hidden / self.weight.width))


def make():
    torch.manual_seed(0)
    hidden = torch.randn(N, D, dtype=torch.float64, requires_grad=True)
    return Readout(), hidden, torch.randint(V, (N,))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("order", [1, 2])
def test_class_and_attributes(mode, order):
    head, hidden, labels = make()
    dense = copy.deepcopy(head)
    for own, other in zip(head.parameters(), dense.parameters()):  # deepcopy drops the attributes
        other.__dict__.update(own.__dict__)
    losses = {
        head: chunked_loss(summed, head, hidden, labels, chunk_size=4, mode=mode),
        dense: summed(dense(hidden), labels),
    }
    found = []
    for module, loss in losses.items():
        leaves = [hidden, *module.parameters()]
        gradients = torch.autograd.grad(loss, leaves, create_graph=order == 2)
        if order == 2:
            gradients = torch.autograd.grad(sum(each.square().sum() for each in gradients), leaves)
        found.append([loss.detach(), *gradients])
    torch.testing.assert_close(*found)
    assert head.bias.calls >= 3
    assert type(head.scale) is Scale
    assert head.scale.is_leaf


def test_class_and_attributes_in_transform():
    head, hidden, labels = make()
    head.requires_grad_(False)
    loss = partial(chunked_loss, summed, head, chunk_size=4)
    got = torch.func.grad(lambda hidden: loss(hidden, labels))(hidden.detach())
    (expected,) = torch.autograd.grad(summed(head(hidden), labels), hidden)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("mode", MODES)
def test_data_is_assigned(mode):
    class Projected(nn.Linear):
        def forward(self, hidden):
            self.weight.data = F.normalize(self.weight.data)
            return super().forward(hidden)

    head = Projected(D, V, dtype=torch.float64)
    before = head.weight.detach().clone()
    _, hidden, labels = make()
    with pytest.raises(
        ValueError, match=r"\.data of what they learn, but did: head\.weight.*before the call"
    ):
        chunked_loss(summed, head, hidden, labels, chunk_size=4, mode=mode)
    assert torch.equal(head.weight, before)
    head.requires_grad_(False)  # a frozen parameter has no copy
    chunked_loss(summed, head, hidden, labels, chunk_size=4).backward()
    torch.testing.assert_close(head.weight, F.normalize(before))
