"""Deferred logits that an autograd.Function is given, or makes."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.deferred import RealLogitsWarning
from tests.deferred.helpers import V, make, plain_and_deferred
from tests.ops.chunked_loss.helpers import close


class OwnLoss(torch.autograd.Function):
    """The sum of squares; of a product that it makes on the way."""

    @staticmethod
    def forward(ctx, logits):
        ctx.save_for_backward(logits)
        return (logits * logits).sum(-1).sum()

    @staticmethod
    def backward(ctx, gradient):
        (logits,) = ctx.saved_tensors
        return 2 * gradient * logits


@pytest.mark.parametrize("derived", [False, True])
def test_autograd_function_refused(derived):
    model, tokens, _ = make()
    with lowtide.defer_logits(model):
        logits = model(tokens)[0]
        with pytest.raises(RuntimeError, match=r"OwnLoss, an autograd.Function, was given deferred logits"):
            OwnLoss.apply(logits[:, 1:] * 2 if derived else logits)


def test_autograd_function_without_context():
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(logits):
            return logits.sum(-1)

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

    model, tokens, _ = make()
    with lowtide.defer_logits(model), torch.no_grad():
        assert (
            Own.apply(model(tokens)[0]).shape == tokens.shape
        )  # nothing is lost where nothing is differentiated
    with (
        lowtide.defer_logits(model),
        pytest.raises(RuntimeError, match=r"^an autograd.Function, was given deferred logits"),
    ):
        Own.apply(model(tokens)[0])


def test_autograd_function_takes_materialized():
    model, tokens, _ = make()

    def use(model):
        logits = model(tokens)[0]
        return OwnLoss.apply(logits if isinstance(logits, torch.Tensor) else logits.materialize())

    with pytest.warns(RealLogitsWarning, match="materialize needs real logits"):
        expected, found, _ = plain_and_deferred(model, use)
    close(found, expected, torch.float32)


def test_autograd_function_with_metric():
    """Logits that a function makes itself are not lost in it."""

    class Whole(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tokens, run):
            with torch.enable_grad():
                logits = run(tokens)
            with torch.no_grad():
                return logits.argmax(-1)

    model, tokens, _ = make()
    expected = model(tokens)[0].argmax(-1)
    with lowtide.defer_logits(model):
        assert torch.equal(Whole.apply(tokens, lambda tokens: model(tokens)[0]), expected)


class Forwards(torch.autograd.Function):
    """Runs what it is given with gradients, as an outer Function that differentiates does."""

    @staticmethod
    def forward(ctx, run, hidden):
        with torch.enable_grad():
            return run(hidden).detach()


class Inner(torch.autograd.Function):
    @staticmethod
    def forward(ctx, head, hidden):
        return head(hidden)

    @staticmethod
    def backward(ctx, upstream):
        return None, upstream


@pytest.mark.parametrize("leaves", ["a Function", "a reentrant checkpoint", "is given to a Function"])
def test_functions_within_a_function_would_lose_the_gradient(leaves):
    head = torch.nn.Linear(8, V)

    def run(hidden):
        if leaves == "a Function":
            logits = Inner.apply(head, hidden)
        elif leaves == "a reentrant checkpoint":
            logits = checkpoint(head, hidden, use_reentrant=True)
        else:
            return OwnLoss.apply(head(hidden))
        return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))

    hidden = torch.randn(5, 8, requires_grad=True)
    with lowtide.defer_logits(head, head=head), pytest.raises(RuntimeError, match="gradient"):
        Forwards.apply(run, hidden)
