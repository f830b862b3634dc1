"""Code that searches a forward's outputs for tensors: torch.distributed finds what it needs, and
any other takes deferred logits for one object."""

import dataclasses
from typing import Any

import pytest
import torch
from torch.distributed.utils import _apply_to_tensors
from torch.nn.parallel.distributed import _find_tensors

import lowtide
from lowtide.deferred import RealLogitsWarning
from lowtide.deferred.proxies.logits import DeferredLogits
from tests.deferred.helpers import V, differentiated, make, norm, plain_and_deferred


@dataclasses.dataclass
class Output:
    loss: Any
    logits: Any


def test_logits_are_no_dataclass():
    model, tokens, _ = make()
    with lowtide.defer_logits(model):
        logits = model(tokens)[0]
        assert not dataclasses.is_dataclass(logits)
        assert not dataclasses.is_dataclass(DeferredLogits)
        assert dataclasses.replace(Output(1, logits), loss=2).logits is logits
        with pytest.raises(TypeError):
            dataclasses.fields(logits)


@pytest.mark.parametrize(
    "convert", [lambda x: dataclasses.asdict(x)["logits"], lambda x: dataclasses.astuple(x)[1]]
)
def test_dataclass_with_logits(convert):
    model, tokens, _ = make()
    expected = model(tokens)[0].logsumexp(-1).detach()
    with lowtide.defer_logits(model), torch.no_grad():
        found = convert(Output(1, model(tokens)[0])).logsumexp(-1)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def single(tensor):
    """As FSDP2 casts outputs."""
    return tensor.float() if torch.is_floating_point(tensor) else tensor


def test_cast_of_outputs():
    model, tokens, _ = make(bias=True)

    def use(model):
        logits = _apply_to_tensors(single, Output(1, model(tokens)[0])).logits
        assert logits.dtype == torch.float32
        return logits.double().logsumexp(-1)

    expected, found, deferral = plain_and_deferred(model, use)
    assert deferral.materialized == {}
    for ours, want in zip(found, expected):
        assert norm(ours - want) <= 1e-6 * norm(want)


def test_cast_of_real_outputs():
    model, tokens, _ = make(bias=True)

    def use(model):
        logits = model(tokens)[0]
        logits.sin()
        logits = _apply_to_tensors(single, [logits])[0]
        assert (logits.dtype, logits.shape) == (torch.float32, (*tokens.shape, V))
        return logits.logsumexp(-1)

    expected = differentiated(model, use(model))
    with lowtide.defer_logits(model), pytest.warns(RealLogitsWarning, match="sin"):
        found = differentiated(model, use(model))
    for ours, want in zip(found, expected):
        assert norm(ours - want) <= 1e-6 * norm(want)


@pytest.mark.parametrize("chain", ["product", "vector", "scale"])
def test_found_tensors_lead_to_parameters(chain):
    """As DistributedDataParallel looks for parameters that are not used."""
    model, tokens, _ = make(bias=True)
    vector = torch.nn.Parameter(torch.randn(V, dtype=torch.float64))
    scale = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
    with lowtide.defer_logits(model):
        logits = model(tokens)[0]
        logits = {"product": logits, "vector": logits + vector, "scale": logits * scale}[chain]
        seen, nodes = set(), [each.grad_fn for each in _find_tensors({"logits": logits})]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [each for each, _ in node.next_functions]
    found = {id(each.variable) for each in seen if hasattr(each, "variable")}
    used = [*model.parameters(), *{"product": [], "vector": [vector], "scale": [scale]}[chain]]
    assert found == {id(each) for each in used}


def test_hook_of_searched_output_runs():
    """As FSDP1 attaches its work before backward."""
    model, tokens, _ = make(bias=True)
    called = []

    def hook(gradient):
        called.append(gradient.shape)

    hook.__module__ = "torch.distributed.fsdp.test"

    def attach(tensor):
        if tensor.requires_grad:
            tensor.register_hook(hook)
        return tensor

    with lowtide.defer_logits(model):
        logits = _apply_to_tensors(attach, [model(tokens)[0]])[0]
        logits.logsumexp(-1).sum().backward()
    assert sorted(called) == sorted([(*tokens.shape, 16), (V, 16), (V,)])
