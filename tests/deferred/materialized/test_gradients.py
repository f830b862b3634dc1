"""Gradients of logits, which a loss does not go through, and weights that change before they are
made.
"""

import pytest
import torch

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
