"""What a deferral counts, and its warning where the head is never called."""

import gc
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.deferred import HeadNotCalledWarning, RealLogitsWarning
from tests.deferred.helpers import V, differentiated, make

NOT_CALLED = r"the deferred head \(Linear\) has not been called in training mode"


def past_the_head(model, tokens, targets):
    """A loss of a product that is no call of the head."""
    hidden = torch.tanh(model.mlp(model.wte(tokens)))
    return F.cross_entropy((hidden @ model.lm_head.weight.t()).view(-1, V), targets.view(-1), ignore_index=-1)


def train(model, loss, optimizer):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_step_without_head_warns_once():
    model, tokens, targets = make()
    optimizer = sgd(model)
    with lowtide.defer_logits(model) as deferral:
        train(model, past_the_head(model, tokens, targets), optimizer)
        with pytest.warns(HeadNotCalledWarning, match=NOT_CALLED) as caught:
            train(model, past_the_head(model, tokens, targets), optimizer)
        assert [warning.filename for warning in caught] == [__file__]
        train(model, past_the_head(model, tokens, targets), optimizer)
        assert deferral.fused == 0


def test_step_with_head_no_grad_warns():
    model, tokens, targets = make()
    optimizer = sgd(model)
    with lowtide.defer_logits(model):
        with torch.no_grad():
            model(tokens)
        train(model, past_the_head(model, tokens, targets), optimizer)
        with pytest.warns(HeadNotCalledWarning):
            train(model, past_the_head(model, tokens, targets), optimizer)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_step_with_head_no_warning(optimizer):
    model, tokens, targets = make()
    own = optimizer(model.parameters(), lr=0.1)
    with lowtide.defer_logits(model):
        train(model, model(tokens, targets)[1], own)
        train(model, past_the_head(model, tokens, targets), own)


def test_step_with_closure_no_warning():
    """Lightning's, in which the head is called."""
    model, tokens, targets = make()
    optimizer = sgd(model)

    def closure():
        optimizer.zero_grad()
        loss = model(tokens, targets)[1]
        loss.backward()
        return loss

    with lowtide.defer_logits(model):
        optimizer.step(closure)


def test_step_of_other_model_no_warning():
    model, tokens, targets = make()
    other, _, _ = make()
    with lowtide.defer_logits(model):
        train(other, other(tokens, targets)[1], sgd(other))
        train(other, other(tokens, targets)[1], sgd(other))


def test_step_of_other_parameters_no_warning():
    """Of a model whose head is trained by another optimizer, or later."""
    model, tokens, targets = make()
    with lowtide.defer_logits(model):
        for _ in range(3):
            train(
                model, past_the_head(model, tokens, targets), torch.optim.SGD(model.mlp.parameters(), lr=0.1)
            )


def test_step_creating_optimizer_state_no_warning():
    model, tokens, targets = make()
    optimizer = torch.optim.AdamW(model.parameters())
    with lowtide.defer_logits(model):
        optimizer.step()
        train(model, model(tokens, targets)[1], optimizer)
        train(model, model(tokens, targets)[1], optimizer)


def test_step_with_frozen_head_warns():
    model, tokens, targets = make()
    model.lm_head.requires_grad_(False)
    optimizer = sgd(model)
    with lowtide.defer_logits(model):
        train(model, past_the_head(model, tokens, targets), optimizer)
        with pytest.warns(HeadNotCalledWarning):
            train(model, past_the_head(model, tokens, targets), optimizer)


LOSSES = {
    "smoothing by hand": (2, lambda lp, y: -(lp.gather(-1, y).mean() + lp.sum(-1).mean() / V)),
    "log-probabilities": (1, lambda lp, y: -lp.gather(-1, y).mean()),
    "log-probabilities of several": (1, lambda lp, y: -lp.gather(-1, y.expand(-1, -1, 2)).mean()),
    "entropy": (1, lambda lp, y: -(lp.exp() * lp).sum(-1).mean()),
    "logsumexp": (1, lambda lp, y: (2 * lp).logsumexp(-1).mean()),
}


@pytest.mark.parametrize("name", LOSSES)
def test_count_results_that_losses_are_made_of(name):
    model, tokens, targets = make()
    count, loss = LOSSES[name]
    with lowtide.defer_logits(model) as deferral:
        log_p = model(tokens)[0].log_softmax(-1)
        loss(log_p, targets.clamp(min=0)[..., None]).backward()
        assert (deferral.fused, deferral.materialized) == (count, {})
        log_p.argmax(-1)  # an accuracy
        with torch.no_grad():
            model(tokens)[0].logsumexp(-1)
        assert (deferral.fused, deferral.materialized) == (count, {})


REPLACED = r"the deferred head \(Linear\) is no longer a module of the model"


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("called", [True, False])
def test_step_with_replaced_head_warns_once(called, kept):
    """As resize_token_embeddings replaces it; before the first step or later."""
    model, tokens, targets = make()
    deferral = lowtide.defer_logits(model)
    if called:
        train(model, model(tokens, targets)[1], sgd(model))
    model.lm_head = nn.Linear(16, V).double()
    if not kept:
        del deferral
        gc.collect()
    optimizer = sgd(model)
    with pytest.warns(HeadNotCalledWarning, match=REPLACED) as caught:
        train(model, model(tokens, targets)[1], optimizer)
    assert [warning.filename for warning in caught] == [__file__]
    train(model, model(tokens, targets)[1], optimizer)


def test_step_with_replaced_head_deferred_again_no_warning():
    model, tokens, targets = make()
    first = lowtide.defer_logits(model)
    model.lm_head = nn.Linear(16, V).double()
    with lowtide.defer_logits(model) as second:
        train(model, model(tokens, targets)[1], sgd(model))
    assert (first.fused, second.fused) == (0, 1)


def test_step_with_head_within_another_module_no_warning():
    """As an adapter's layer is put around it."""
    model, tokens, targets = make()
    with lowtide.defer_logits(model) as deferral:
        model.lm_head = nn.Sequential(model.lm_head)
        for _ in range(2):
            train(model, model(tokens, targets)[1], sgd(model))
    assert deferral.fused == 2


def test_step_after_deferral_no_warning():
    model, tokens, targets = make()
    optimizer = sgd(model)
    lowtide.defer_logits(model).undo()
    train(model, past_the_head(model, tokens, targets), optimizer)
    train(model, past_the_head(model, tokens, targets), optimizer)
    lowtide.defer_logits(make()[0])
    gc.collect()
    train(model, past_the_head(model, tokens, targets), optimizer)


COMPILED = pytest.mark.parametrize(
    "backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.extended)]
)


@COMPILED
def test_count_compiled_losses(backend):
    model, tokens, targets = make()
    optimizer = sgd(model)
    torch._dynamo.reset()
    with lowtide.defer_logits(model) as deferral:
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        for steps in (1, 2, 3):
            train(model, compiled(tokens, targets)[1], optimizer)
            assert (deferral.fused, deferral.materialized) == (steps, {})


@COMPILED
def test_count_compiled_real_logits(backend):
    model, tokens, _ = make()
    torch._dynamo.reset()
    expected = differentiated(model, model(tokens)[0].sigmoid().mean())
    with lowtide.defer_logits(model) as deferral:
        compiled = torch.compile(lambda: model(tokens)[0].sigmoid().mean(), fullgraph=True, backend=backend)
        for runs in (1, 2):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", RealLogitsWarning)
                loss = compiled()
            assert [each.category for each in caught] == [RealLogitsWarning] * (runs == 1)
            torch.testing.assert_close(differentiated(model, loss), expected, rtol=1e-9, atol=1e-12)
            assert (deferral.fused, deferral.materialized) == (0, {"torch.sigmoid": runs})


def test_step_compiled_without_head_warns():
    model, tokens, targets = make()
    torch._dynamo.reset()
    compiled = torch.compile(past_the_head, fullgraph=True, backend="eager")
    with lowtide.defer_logits(model):
        train(model, compiled(model, tokens, targets), sgd(model))
        with pytest.warns(HeadNotCalledWarning, match=NOT_CALLED):
            train(model, compiled(model, tokens, targets), sgd(model))


class PositionsAsWideAsLayers(nn.Module):
    """As GPT-2 medium: 1024 positions, layers of 1024 features."""

    def __init__(self, tied):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(V, 16), nn.Embedding(16, 16)
        self.mlp, self.lm_head = nn.Linear(16, 16), nn.Linear(16, V, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight


def test_head_found_by_tied_weight():
    with lowtide.defer_logits(model := PositionsAsWideAsLayers(True)) as deferral:
        assert deferral.head is model.lm_head


def test_head_ambiguous_error_names_layers():
    with pytest.raises(ValueError, match=r"mlp, lm_head all have as many outputs .* pass head="):
        lowtide.defer_logits(PositionsAsWideAsLayers(False))
