"""Operators called past torch's dispatcher, and all that must still see them."""

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from lowtide.core import operator
from lowtide.ops.linear_cross_entropy.operator import ops


class Dispatched(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function._schema.name)
        return function(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.functions = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.functions.append(function)
        return function(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    pass


@pytest.fixture
def dispatched(monkeypatch):
    """No call may go past the dispatcher."""

    def direct(*arguments):
        raise AssertionError

    monkeypatch.setattr(operator, "_direct", {ops.linear_cross_entropy: direct})


def inputs():
    torch.manual_seed(0)
    x, w = torch.randn(6, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    return x, w, torch.randint(11, (6,))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_same_bits_with_and_without_the_dispatcher(monkeypatch, reduction):
    x, w, target = inputs()
    results = []
    for direct in (operator._direct, {}):
        monkeypatch.setattr(operator, "_direct", direct)
        value = lowtide.linear_cross_entropy(x, w, target, reduction=reduction)
        results.append((value, *torch.autograd.grad(value.sum(), (x, w))))
        with torch.no_grad():
            results[-1] += (lowtide.linear_cross_entropy(x, w, target, reduction=reduction),)
    for one, other in zip(*results):
        assert torch.equal(one, other)


def test_direct_call_is_direct(monkeypatch):
    called = []
    direct = operator._direct[ops.linear_cross_entropy]
    monkeypatch.setitem(
        operator._direct, ops.linear_cross_entropy, lambda *given: called.append(1) or direct(*given)
    )
    lowtide.linear_cross_entropy(*inputs()).backward()
    assert called == [1]


@pytest.mark.usefixtures("dispatched")
@pytest.mark.parametrize("mode", [Dispatched, Functions])
def test_modes_see_the_operator(mode):
    with mode() as seen:
        lowtide.linear_cross_entropy(*inputs())
    if mode is Dispatched:
        assert "lowtide::linear_cross_entropy" in seen.names
    else:
        assert ops.linear_cross_entropy in seen.functions


@pytest.mark.usefixtures("dispatched")
def test_profiles_name_the_operator():
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as found:  # torch 2.11 warns without
        lowtide.linear_cross_entropy(*inputs())
    assert "lowtide::linear_cross_entropy" in {event.name for event in found.events()}


@pytest.mark.usefixtures("dispatched")
def test_subclasses_and_fake_tensors_are_dispatched():
    x, w, target = inputs()
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert (
            lowtide.linear_cross_entropy(
                mode.from_tensor(x), mode.from_tensor(w), mode.from_tensor(target)
            ).shape
            == ()
        )
    assert not operator._are_plain([[x.as_subclass(Subclass)]])
    assert not operator._are_plain([x.to("meta")])
    assert operator._are_plain([[x], (torch.nn.Parameter(w),), target, None, 1])


@pytest.mark.usefixtures("dispatched")
def test_graphs_have_the_operator():
    from torch.fx.experimental.proxy_tensor import make_fx

    x, w, target = (each.detach() for each in inputs())
    graph = make_fx(lambda x, w, target: lowtide.linear_cross_entropy(x, w, target))(x, w, target)
    assert ops.linear_cross_entropy in {node.target for node in graph.graph.nodes}


@pytest.mark.usefixtures("dispatched")
def test_transforms_compute_by_rows():
    x, w, target = inputs()
    found = torch.func.grad(lambda x: lowtide.linear_cross_entropy(x, w.detach(), target))(x.detach())
    truth = torch.autograd.grad(torch.nn.functional.cross_entropy(x @ w.T, target), x)[0]
    torch.testing.assert_close(found, truth)


def with_negative_bit(tensor):
    """A view whose memory holds numbers of the other sign."""
    view = torch.complex(torch.zeros_like(tensor), -tensor).conj().imag
    assert view.is_neg()
    assert torch.equal(view, tensor)
    return view


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns of tanh in the interpreter
@pytest.mark.parametrize("negated", ["input", "linear_weight", "target", "linear_bias", "weight", "upstream"])
def test_views_with_the_negative_bit_are_read_as_what_they_say(negated):
    generator = torch.Generator().manual_seed(2)
    shapes = {"input": (6, 7), "linear_weight": (22, 7), "target": (6, 22), "linear_bias": (22,)}
    shapes |= {"weight": (22,), "upstream": (6,)}
    tensors = {name: torch.rand(shape, generator=generator) for name, shape in shapes.items()}

    def differentiated(upstream, **tensors):
        leaves = {
            name: each.detach().requires_grad_(name in ("input", "linear_weight"))
            for name, each in tensors.items()
        }
        loss = lowtide.linear_cross_entropy(**leaves, softcap=3.0, reduction="none", backend="triton")
        gradients = torch.autograd.grad(loss, (leaves["input"], leaves["linear_weight"]), upstream)
        return [loss.detach(), *gradients]

    plain = differentiated(**tensors)
    found = differentiated(**tensors | {negated: with_negative_bit(tensors[negated])})
    torch.testing.assert_close(found, plain)


def test_tensors_without_memory_are_dispatched():
    assert not operator._are_plain([torch._efficientzerotensor(3)])
