"""What head and loss_fn reach beside their arguments has changed when a chunk is computed again: an
error says what, or the gradients are those of the values that the loss was computed with."""

import collections
import enum
import functools
import itertools
import random
import types
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from lowtide.ops.chunked_loss import chunked_loss
from tests.ops.chunked_loss.constants import check, inputs, scaled
from tests.ops.chunked_loss.helpers import V

FACTOR = 2.0
TABLE = {"factor": 2.0}
SETTINGS = SimpleNamespace(factor=2.0)
module = types.ModuleType("settings_of_a_script")
module.factor = 2.0


class Config:
    factor = 2.0


class Slotted:
    __slots__ = ("factor",)

    def __init__(self):
        self.factor = 2.0


@dataclass
class Nested:
    inner: SimpleNamespace


class Kind(enum.Enum):
    LOW = 2.0
    HIGH = -3.0


def with_a_global(logits, labels):
    return scaled(logits, labels, FACTOR)


def through_a_helper(logits, labels):
    return with_a_global(logits, labels)


class Loss:
    def __init__(self):
        self.factor = 2.0

    def __call__(self, logits, labels):
        return scaled(logits, labels, self.factor)

    def method(self, logits, labels):
        return self.helper(logits) + 0 * labels.sum()

    def helper(self, logits):
        return logits.square().sum() * self.twice

    @property
    def twice(self):
        return 2 * self.factor

    def looked_up(self, logits, labels):
        return scaled(logits, labels, getattr(self, "factor"))  # noqa: B009


# Each way that a constant comes in: a loss function, and what changes the constant.


def of_a_tensor():
    factor = torch.tensor(2.0, dtype=torch.float64)
    return lambda a, y: scaled(a, y, factor), lambda: factor.fill_(-3)


def of_another_tensor():
    factor = torch.tensor(2.0, dtype=torch.float64)

    def change():
        nonlocal factor
        factor = torch.tensor(-3.0, dtype=torch.float64)

    return lambda a, y: scaled(a, y, factor), change


def of_a_number():
    factor = 2.0

    def change():
        nonlocal factor
        factor = -3.0

    return lambda a, y: scaled(a, y, factor), change


def of_a_nested_closure():
    factor = torch.tensor(2.0, dtype=torch.float64)

    def inner(a, y):
        return scaled(a, y, factor)

    return functools.partial(lambda a, y, inner: inner(a, y), inner=inner), lambda: factor.fill_(-3)


def of_a_decorated_function():
    factor = torch.tensor(2.0, dtype=torch.float64)

    @torch.enable_grad()
    def inner(a, y):
        return scaled(a, y, factor)

    return inner, lambda: factor.fill_(-3)


def of_a_default():
    factors = [2.0]
    return lambda a, y, factors=factors: scaled(a, y, factors[0]), lambda: factors.__setitem__(0, -3.0)


def of_keywords():
    loss_fn = functools.partial(scaled, factor=2.0)
    return loss_fn, lambda: loss_fn.keywords.update(factor=-3.0)


def of_an_attribute():
    cfg = SimpleNamespace(factor=2.0)
    return lambda a, y: scaled(a, y, cfg.factor), lambda: setattr(cfg, "factor", -3.0)


def of_nested_attributes():
    cfg = Nested(SimpleNamespace(factors={"b": [2.0]}))
    change = functools.partial(cfg.inner.factors["b"].__setitem__, 0, -3.0)
    return lambda a, y: scaled(a, y, cfg.inner.factors["b"][0]), change


def of_another_object():
    cfg = SimpleNamespace(inner=SimpleNamespace(factor=2.0))
    change = functools.partial(setattr, cfg, "inner", SimpleNamespace(factor=-3.0))
    return lambda a, y: scaled(a, y, cfg.inner.factor), change


def of_slots():
    cfg = Slotted()
    return lambda a, y: scaled(a, y, cfg.factor), lambda: setattr(cfg, "factor", -3.0)


def of_an_array():
    factors = np.array([2.0])
    return lambda a, y: scaled(a, y, factors[0]), lambda: factors.fill(-3)


def of_a_member():
    cfg = SimpleNamespace(kind=Kind.LOW)
    return lambda a, y: scaled(a, y, cfg.kind.value), lambda: setattr(cfg, "kind", Kind.HIGH)


def of_a_deque():
    factors = collections.deque([2.0, 1.0])
    return lambda a, y: scaled(a, y, factors[0]), lambda: factors.rotate()


def of_a_callable(method=None):
    loss = Loss()
    loss_fn = loss if method is None else getattr(loss, method)
    return loss_fn, lambda: setattr(loss, "factor", -3.0)


def of_a_frozen_module():
    frozen = nn.Linear(V, V).double().requires_grad_(False)
    return lambda a, y: scaled(frozen(a), y, 1.0), lambda: frozen.weight.mul_(2)


def of_dropout():
    drop = nn.Dropout(0.5).double()
    return lambda a, y: scaled(drop(a), y, 1.0), lambda: setattr(drop, "p", 0.1)


def of_evaluation():
    drop = nn.Dropout(0.5).double()
    return lambda a, y: scaled(drop(a), y, 1.0), drop.eval


WAYS = {name.removeprefix("of_"): way for name, way in dict(globals()).items() if name.startswith("of_")}
WAYS |= {method: functools.partial(of_a_callable, method) for method in ("method", "looked_up")}


@pytest.mark.parametrize("way", WAYS)
def test_constant_changed(way):
    check(*WAYS[way](), names="loss_fn")


@pytest.mark.parametrize("loss_fn", [with_a_global, through_a_helper])
def test_constant_global(loss_fn, monkeypatch):
    check(loss_fn, lambda: monkeypatch.setitem(globals(), "FACTOR", -3.0), names="FACTOR")


def test_constant_in_global_dictionary(monkeypatch):
    check(
        lambda a, y: scaled(a, y, TABLE["factor"]),
        lambda: monkeypatch.setitem(TABLE, "factor", -3.0),
        names="TABLE",
    )


@pytest.mark.parametrize("owner", ["SETTINGS", "Config", "module"])
def test_constant_attribute_of_global(owner, monkeypatch):
    loss_fn = {
        "SETTINGS": lambda a, y: scaled(a, y, SETTINGS.factor),
        "Config": lambda a, y: scaled(a, y, Config.factor),
        "module": lambda a, y: scaled(a, y, module.factor),
    }[owner]
    check(loss_fn, lambda: monkeypatch.setattr(globals()[owner], "factor", -3.0), names=f"{owner}.factor")


def test_constant_dictionary_argument():
    head, hidden, labels = inputs()
    options = {"factor": 2.0}
    loss_fn = lambda a, y, options: scaled(a, y, options["factor"])  # noqa: E731
    loss = chunked_loss(loss_fn, head, hidden, labels, options, chunk_size=7, mode="recompute")
    options["factor"] = -3.0
    with pytest.raises(RuntimeError, match=r"must not change.*token_tensors\[1\]\['factor'\]"):
        loss.backward()


@pytest.mark.parametrize("mode", ["recompute", "gradient_in_forward"])
def test_constant_changed_before_higher_orders(mode):
    head, hidden, labels = inputs()
    loss_fn, change = of_a_number()
    loss = chunked_loss(loss_fn, head, hidden, labels, chunk_size=7, mode=mode)
    torch.autograd.grad(loss, hidden, create_graph=True, retain_graph=True)
    change()
    with pytest.raises(RuntimeError, match=r"must not change.*factor"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_constant_not_detected():
    """An iterator, random numbers from elsewhere: the loss is another one."""
    head, hidden, labels = inputs()
    factors = itertools.count(2)
    generator = torch.Generator().manual_seed(1)
    for loss_fn in (
        lambda a, y: scaled(a, y, float(next(factors))),
        lambda a, y: scaled(a, y, 1 + random.random()),
        lambda a, y: scaled(a, y, torch.rand((), generator=generator).item()),
    ):
        loss = chunked_loss(loss_fn, head, hidden, labels, chunk_size=7, mode="recompute")
        with pytest.raises(RuntimeError, match=r"loss must be the same.*token tensor"):
            loss.backward()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_constant_not_detected_on_cuda():
    """Without waiting for the device: NaN."""
    head, hidden, labels = inputs("cuda")
    factors = itertools.count(2)
    loss_fn = lambda a, y: scaled(a, y, float(next(factors)))  # noqa: E731
    loss = chunked_loss(loss_fn, head, hidden, labels, chunk_size=7, mode="recompute")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        (gradient,) = torch.autograd.grad(loss, hidden)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert gradient.isnan().any(1).all()


def test_argument_scheduled_accepted():
    """As the error says: each call has its own value."""
    head, hidden, labels = inputs()
    factors = (2.0, 3.0)
    losses = [
        chunked_loss(scaled, head, hidden, labels, each, chunk_size=7, mode="recompute") for each in factors
    ]
    for factor, loss in zip(factors, losses):
        (expected,) = torch.autograd.grad(scaled(head(hidden), labels, factor), hidden)
        torch.testing.assert_close(torch.autograd.grad(loss, hidden)[0], expected)
