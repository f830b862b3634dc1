"""Training loops that nobody rewrote, beside the same loops without the deferral."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from tests.deferred.helpers import V, check, make, plain_and_deferred, within_eager
from tests.ops.chunked_loss.helpers import close


def trained(model, step, deferred, count=5):
    """Losses and final parameters."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    deferral = lowtide.defer_logits(model)
    if not deferred:
        deferral.undo()
    losses = []
    for _ in range(count):
        losses.append(step(model))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if deferred:
        assert deferral.fused >= count
        assert deferral.materialized == {}
    return [torch.stack(losses), *(each.detach() for each in model.parameters())]


def loop(model, step):
    """In float32, as near to a float64 run as the plain model."""
    exact = trained(model, step, deferred=False)
    model = copy.deepcopy(model).float()
    found, plain = (trained(model, step, deferred) for deferred in (True, False))
    for ours, eager, want in zip(found, plain, exact):
        within_eager(ours, eager, want, torch.float32)


@pytest.mark.parametrize("tied", [False, True])
def test_plain_loop(tied):
    model, tokens, targets = make(tied=tied)

    def step(model):
        _, loss = model(tokens, targets)
        loss.backward()
        return loss.detach()

    loop(model, step)


def test_gradients_accumulate():
    model, tokens, targets = make()

    def step(model):
        total = 0.0
        for rows, wanted in zip(tokens, targets):
            logits, _ = model(rows[None])
            loss = (
                F.cross_entropy(logits.view(-1, V), wanted, ignore_index=-1, reduction="sum")
                / targets.numel()
            )
            loss.backward()
            total += loss.detach()
        return total

    loop(model, step)


def test_loss_outside_model_with_accuracy():
    model, tokens, targets = make()
    criterion = nn.CrossEntropyLoss(ignore_index=-1)

    def step(model):
        logits, _ = model(tokens)
        loss = criterion(logits.transpose(1, 2), targets)
        loss.backward()
        assert 0 <= (logits.argmax(-1) == targets).double().mean() <= 1
        return loss.detach()

    loop(model, step)


def test_retained_graph():
    model, tokens, targets = make()

    def gradients():
        loss = model(tokens, targets)[1]
        first = torch.autograd.grad(0.3 * loss, list(model.parameters()), retain_graph=True)
        return [*first, *torch.autograd.grad(-loss, list(model.parameters()))]

    expected = gradients()
    with lowtide.defer_logits(model):
        close(gradients(), expected)


def test_two_losses_of_same_logits():
    model, tokens, targets = make()

    def use(model):
        logits, loss = model(tokens, targets)
        return loss + 0.1 * logits.logsumexp(-1).square().mean() + logits[:, -1].log_softmax(-1)[:, 3].mean()

    with pytest.warns(lowtide.deferred.RealLogitsWarning, match="Tensor.__getitem__"):
        expected, found, deferral = plain_and_deferred(model, use)
    assert deferral.fused == 2  # the cross-entropy and the logsumexp
    close(found, expected)


@pytest.mark.parametrize("frozen", ["lm_head", "mlp", "wte"])
def test_frozen(frozen):
    model, tokens, targets = make()
    getattr(model, frozen).requires_grad_(False)
    check(model, lambda model: model(tokens, targets)[1])


def test_frozen_below_head():
    model, tokens, targets = make()
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    check(model, lambda model: model(tokens, targets)[1])


def test_no_grad_in_training_mode():
    model, tokens, targets = make()
    with torch.no_grad():
        expected = model(tokens, targets)[1]
        with lowtide.defer_logits(model) as deferral:
            logits, loss = model(tokens, targets)
    assert not loss.requires_grad
    assert not logits.requires_grad
    assert not F.cross_entropy(logits.view(-1, V), targets.view(-1), ignore_index=-1).requires_grad
    assert deferral.materialized == {}
    close([loss], [expected])


def test_inference_mode_in_training_mode():
    model, tokens, targets = make()
    with torch.inference_mode(), lowtide.defer_logits(model):
        logits, loss = model(tokens, targets)
        assert loss.isfinite()
        assert logits.argmax(-1).shape == tokens.shape
        with pytest.warns(lowtide.deferred.RealLogitsWarning, match="sin"):
            assert logits.sin().isfinite().all()
