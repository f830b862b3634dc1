"""Gradients of logits, which a loss does not go through, and weights that change before they are
made.
"""

import pytest
import torch
import torch.nn.functional as F

import lowtide
from tests.deferred.helpers import B, T, V, make
from tests.ops.chunked_loss.helpers import close


@pytest.mark.parametrize("name", ["retain_grad", "register_hook", "grad"])
def test_gradient_of_logits_refused(name):
    model, tokens, _ = make()
    with (
        lowtide.defer_logits(model),
        pytest.raises(RuntimeError, match=r"the loss does not go through these"),
    ):
        getattr(model(tokens)[0], name)


def test_gradient_wrt_logits_refused():
    model, tokens, targets = make()
    with lowtide.defer_logits(model):
        logits, loss = model(tokens, targets)
        with pytest.raises(RuntimeError, match=r"torch.autograd.grad: the loss does not go through these"):
            torch.autograd.grad(loss, logits, allow_unused=True)


@pytest.mark.filterwarnings("ignore::lowtide.deferred.RealLogitsWarning")
def test_gradient_from_logits():
    model, tokens, _ = make()
    expected = torch.autograd.grad(model(tokens)[0], model.wte.weight, torch.ones(B, T, V).double())
    with lowtide.defer_logits(model):
        found = torch.autograd.grad(model(tokens)[0], model.wte.weight, torch.ones(B, T, V).double())
    close(found, expected, torch.float32)


def leaf_by_method(logits):
    return logits.detach().requires_grad_()


def leaf_by_attribute(logits):
    leaf = logits.detach()
    leaf.requires_grad = True
    return leaf


@pytest.mark.filterwarnings("ignore::lowtide.deferred.RealLogitsWarning")
@pytest.mark.parametrize("leaf_of", [leaf_by_method, leaf_by_attribute])
def test_backward_in_two_parts(leaf_of):
    """Detached logits that require a gradient are a leaf; the first part ends there."""
    model, tokens, targets = make()

    def use():
        model.zero_grad()
        logits = model(tokens)[0]
        leaf = leaf_of(logits)
        hooked = []
        leaf.register_hook(hooked.append)
        loss = F.cross_entropy(leaf.view(-1, V), targets.view(-1), ignore_index=-1)
        (first,) = torch.autograd.grad(loss, leaf, retain_graph=True)
        loss.backward()
        assert leaf.requires_grad
        assert leaf.is_leaf
        logits.backward(leaf.grad)
        found = [first, *hooked, leaf.grad, *(each.grad for each in model.parameters())]
        leaf.grad = None
        assert leaf.grad is None
        return found

    expected = use()
    with lowtide.defer_logits(model):
        close(use(), expected)


def test_requires_grad_as_it_is():
    """Nothing is made real where nothing changes."""
    model, tokens, targets = make()
    with lowtide.defer_logits(model) as deferral:
        logits = model(tokens)[0]
        logits.requires_grad = True
        detached = logits.detach().requires_grad_(False)
        assert logits.requires_grad_() is logits
        assert not detached.requires_grad
        F.cross_entropy(logits.requires_grad_().view(-1, V), targets.view(-1), ignore_index=-1).backward()
    assert deferral.materialized == {}
    assert deferral.fused == 1


@pytest.mark.filterwarnings("ignore::lowtide.deferred.RealLogitsWarning")
def test_gradient_of_no_leaf_refused():
    model, tokens, _ = make()
    with (
        lowtide.defer_logits(model),
        pytest.raises(RuntimeError, match="change requires_grad flags of leaf variables"),
    ):
        model(tokens)[0].requires_grad_(False)


def test_weight_changed_refused():
    model, tokens, targets = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lowtide.defer_logits(model):
        logits, loss = model(tokens, targets)
        loss.backward()
        best = logits.argmax(-1)
        optimizer.step()
        assert best.shape == (B, T)
        with pytest.raises(
            RuntimeError, match=r"changed in place since the head was called \(by optimizer.step"
        ):
            logits.argmax(-1)
