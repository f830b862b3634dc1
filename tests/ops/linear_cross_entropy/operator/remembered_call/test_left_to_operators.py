"""Calls that go by the operators each time: modes, subclasses, a number as normalizer."""

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from tests.ops.linear_cross_entropy.operator.remembered_call.helpers import check, loss_of, tensors

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


class Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Named(torch.Tensor):
    """A subclass, whose own code is to see the call."""


@pytest.mark.parametrize("mode", [Functions, Dispatches, lambda: torch.profiler.profile(acc_events=True)])
def test_modes_see_the_operators(device, went, mode):
    given = tensors(device)
    check(*given)
    went.clear()
    with mode():
        loss_of(*given)
    assert went == ["operator"]


def test_subclasses_see_the_operators(device, went):
    x, w, target = tensors(device)
    check(x, w, target)
    went.clear()
    loss_of(x.detach().as_subclass(Named).requires_grad_(), w, target)
    assert went == ["operator"]


def test_a_number_as_normaliser_goes_by_the_operators(device, went):
    given = tensors(device)
    check(*given)
    went.clear()
    for _ in range(2):
        loss_of(*given, normalizer=5.0)
    assert went == ["operator"] * 2


@pytest.mark.parametrize("kind", ["none", "log-probabilities"])
def test_modes_around_backward_see_the_operators(device, went, kind):
    x, w, target = tensors(device)
    for _ in range(2):
        if kind == "none":
            loss = loss_of(x, w, target, reduction="none").sum()
        else:
            loss = lowtide.linear_log_probs(x, w, target, backend="triton").log_prob.sum()
    expected = torch.autograd.grad(loss, (x, w), retain_graph=True)
    went.clear()
    with torch.profiler.profile(acc_events=True):
        found = torch.autograd.grad(loss, (x, w))
    assert went == ["operator"]
    assert all(map(torch.equal, found, expected))
