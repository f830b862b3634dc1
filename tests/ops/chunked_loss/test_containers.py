"""Dictionaries, lists and tuples that reach head and loss function: learned tensors, and logs."""

from collections import Counter, OrderedDict, defaultdict, namedtuple
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tests.ops.chunked_loss.helpers import (
    MODES,
    B,
    T,
    chunked_loss,
    close,
    cross_entropy,
    dense,
    leaves,
    make,
)

Pair = namedtuple("Pair", ["weight", "bias"])


class Output(OrderedDict):
    """As outputs of Transformers: attributes and items are the same, `update` is refused."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def update(self, *_, **__):
        raise TypeError("use items")


def output(**parts):
    made = Output()
    for key, each in parts.items():
        made[key] = each
    return made


KINDS = {
    "OrderedDict": OrderedDict,
    "defaultdict": partial(defaultdict, int),
    "namedtuple": Pair,
    "output": output,
    "nested": lambda weight, bias: [weight, {"bias": (bias,)}],
}


def parts_of(container):
    if isinstance(container, dict):
        return container["weight"], container["bias"]
    return container if isinstance(container, tuple) else (container[0], container[1]["bias"][0])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_learned_tensors(device, kind, mode):
    module, hidden, labels = make("linear", device=device)
    container = KINDS[kind](weight=module.weight, bias=module.bias)

    def head(container, hidden):
        weight, bias = parts_of(container)
        same = not isinstance(container, Output) or container.weight is container["weight"]
        assert type(container) is type(KINDS[kind](weight=weight, bias=bias))
        assert same
        return F.linear(hidden, weight, bias)

    def loss_fn(logits, labels, container):
        return cross_entropy(logits, labels) + len(labels) * parts_of(container)[1].square().sum()

    results = []
    for loss_of in (chunked_loss, dense):
        loss = loss_of(loss_fn, partial(head, container), hidden, labels, container, chunk_size=5, mode=mode)
        results.append([loss.detach(), *torch.autograd.grad(loss, leaves(module, hidden))])
    close(*results)
    assert all(own is each for own, each in zip(parts_of(container), (module.weight, module.bias)))


def test_state_dict_of_functional_call(device):
    head, hidden, labels = make("linear", device=device)
    by_state = partial(torch.func.functional_call, head, head.state_dict(keep_vars=True))
    results = [
        torch.autograd.grad(loss_of(cross_entropy, own, hidden, labels, chunk_size=5), leaves(head, hidden))
        for loss_of, own in ((chunked_loss, by_state), (dense, head))
    ]
    close(*results)


@pytest.mark.parametrize("how", ["partial", "argument"])
def test_logs_are_the_callers_own(device, how):
    """The functions write into the containers that they were given."""
    head, hidden, labels = make("linear", device=device)
    counts, losses, kinds = {}, [], Counter()

    def loss_fn(logits, labels, counts, losses, kinds):
        loss = cross_entropy(logits, labels)
        counts["rows"] = counts.get("rows", 0) + len(labels)
        losses.append(loss.detach())
        kinds["chunks"] += 1
        return loss

    if how == "partial":
        logged = partial(loss_fn, counts=counts, losses=losses, kinds=kinds)
        loss = chunked_loss(logged, head, hidden, labels, chunk_size=5)
    else:
        loss = chunked_loss(loss_fn, head, hidden, labels, counts, losses, kinds, chunk_size=5)
    assert counts == {"rows": B * T}
    assert kinds == {"chunks": 4}
    torch.testing.assert_close(torch.stack(losses).sum(), loss.detach())
