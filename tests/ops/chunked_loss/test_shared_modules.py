"""A module that head and loss_fn reach by several names keeps its parameters, and trains.

Shapes: N rows, D features, V classes.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lowtide.ops.chunked_loss import chunked_loss
from tests.ops.chunked_loss.helpers import MODES

N, D, V = 7, 5, 11


class Model(nn.Module):
    """A head whose model also computes the loss."""

    def __init__(self):
        super().__init__()
        self.lm_head = nn.Linear(D, V)

    def forward(self, hidden):
        return self.lm_head(hidden)

    def loss(self, logits, labels):
        return F.cross_entropy(logits, labels, reduction="sum")


def loss_of(model, logits, labels):
    return model.loss(logits, labels)


def of_two_methods():
    model = Model()
    return model, model.loss, model.forward


def of_a_method_and_a_submodule():
    model = Model()
    return model, model.loss, model.lm_head


def of_a_partial():
    model = Model()
    return model, partial(loss_of, model), model.lm_head


def of_a_layer_twice():
    layer = nn.Linear(D, D)
    model = nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(D, V))
    return model, partial(F.cross_entropy, reduction="sum"), model


def of_two_attributes():
    model = Model()
    model.alias = model.lm_head
    return model, model.loss, model


CALLS = [of_two_methods, of_a_method_and_a_submodule, of_a_partial, of_a_layer_twice, of_two_attributes]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("call", CALLS)
def test_training_is_that_of_dense_computation(call, mode):
    losses = {}
    for loss in ("dense", "chunked"):
        torch.manual_seed(0)
        model, loss_fn, head = call()
        model.double()
        hidden, labels = torch.randn(N, D, dtype=torch.float64), torch.randint(V, (N,))
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        losses[loss] = []
        for _ in range(3):
            optimizer.zero_grad()
            if loss == "dense":
                value = loss_fn(head(hidden), labels)
            else:
                value = chunked_loss(loss_fn, head, hidden, labels, chunk_size=3, mode=mode)
            value.backward()
            optimizer.step()
            losses[loss].append(value.item())
    assert losses["chunked"] == pytest.approx(losses["dense"], rel=1e-12)
    assert losses["dense"][2] < losses["dense"][1] < losses["dense"][0]


@pytest.mark.parametrize("call", CALLS)
def test_parameters_stay(call):
    """Also without gradients: a validation loss must not freeze a weight."""
    model, loss_fn, head = call()
    before = dict(model.named_parameters(remove_duplicate=False))
    hidden, labels = torch.randn(N, D), torch.randint(V, (N,))
    with torch.no_grad():
        chunked_loss(loss_fn, head, hidden, labels, chunk_size=3)
    chunked_loss(loss_fn, head, hidden, labels, chunk_size=3).backward()
    after = dict(model.named_parameters(remove_duplicate=False))
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    assert all(each.grad is not None for each in model.parameters())


@pytest.mark.parametrize("call", CALLS)
def test_parameters_come_back_after_an_error(call):
    model, loss_fn, head = call()
    before = dict(model.named_parameters(remove_duplicate=False))

    def failing(logits, labels):
        assert all(parameter is not before[name] for name, parameter in model.named_parameters())
        if not labels.all():
            raise KeyError("here")
        return loss_fn(logits, labels)

    labels = torch.tensor([1, 1, 1, 1, 0, 1, 1])
    for mode in MODES:
        with pytest.raises(KeyError, match="here"):
            chunked_loss(partial(failing), head, torch.randn(N, D), labels, chunk_size=3, mode=mode)
        after = dict(model.named_parameters(remove_duplicate=False))
        assert all(after[name] is before[name] for name in before)


@pytest.mark.parametrize("mode", MODES)
def test_no_chunk_goes_through_the_model(mode, monkeypatch):
    """A bound method brings its whole model, which may have thousands of layers."""
    model, calls = Model(), []
    model.trunk = nn.Sequential(*(nn.Linear(D, D) for _ in range(4)))
    own = nn.Module.named_modules
    monkeypatch.setattr(
        nn.Module, "named_modules", lambda *args, **kwargs: calls.append(1) or own(*args, **kwargs)
    )
    counts = set()
    for chunk_size in (N, 1):
        calls.clear()
        chunked_loss(
            partial(F.cross_entropy, reduction="sum"),
            model.forward,
            torch.randn(N, D),
            torch.ones(N, dtype=torch.long),
            chunk_size=chunk_size,
            mode=mode,
        ).backward()
        counts.add(len(calls))
    assert len(counts) == 1


class OwnNames(nn.Linear):
    """A layer that lists its parameters in a way of its own."""

    def named_parameters(self, prefix="", recurse=True):
        yield from super().named_parameters(prefix, recurse)


def test_layer_with_named_parameters_of_its_own():
    head = nn.Sequential(OwnNames(D, V))
    hidden, labels = torch.randn(N, D), torch.ones(N, dtype=torch.long)
    chunked_loss(partial(F.cross_entropy, reduction="sum"), head, hidden, labels).backward()
    assert head[0].weight.grad is not None
