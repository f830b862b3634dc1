"""Checkpoints around the body, the head and the loss, beside the same without the deferral."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.deferred import RealLogitsWarning
from tests.deferred.helpers import V, check, make
from tests.ops.chunked_loss.helpers import close


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("what", ["body", "model"])
def test_checkpointing(what, reentrant):
    model, tokens, targets = make()

    def use(model):
        x = model.wte(tokens)
        if what == "body":
            x = checkpoint(lambda x: torch.tanh(model.mlp(x)), x, use_reentrant=reentrant)
            return F.cross_entropy(model.lm_head(x).view(-1, V), targets.view(-1), ignore_index=-1)

        def loss(x):
            logits = model.lm_head(torch.tanh(model.mlp(x)))
            return F.cross_entropy(logits.view(-1, V), targets.view(-1), ignore_index=-1)

        return checkpoint(loss, x, use_reentrant=reentrant)

    def gradients():
        model.zero_grad()
        use(model).backward()
        return [each.grad.clone() for each in model.parameters()]

    expected = gradients()
    with lowtide.defer_logits(model) as deferral:
        close(gradients(), expected)
    assert deferral.fused > 0
    assert deferral.materialized == {}


def test_checkpointing_head():
    model, tokens, targets = make()

    def use(model):
        logits = checkpoint(model.lm_head, torch.tanh(model.mlp(model.wte(tokens))), use_reentrant=False)
        return F.cross_entropy(logits.view(-1, V), targets.view(-1), ignore_index=-1)

    check(model, use)


@pytest.mark.parametrize("what", ["head", "layer and head"])
def test_checkpointing_head_reentrant(what):
    """Its first pass has no gradients, and must not be taken for a loss without them, beside
    another term neither."""
    model, tokens, targets = make()
    head = model.lm_head if what == "head" else lambda h: model.lm_head(torch.tanh(h))
    with lowtide.defer_logits(model):
        x = torch.tanh(model.mlp(model.wte(tokens)))
        logits = checkpoint(head, x, use_reentrant=True)
        with pytest.raises(RuntimeError, match=r"have left CheckpointFunction, .* use_reentrant=False"):
            F.cross_entropy(logits.view(-1, V), targets.view(-1), ignore_index=-1) + x.square().mean()
        with pytest.raises(RuntimeError, match=r"have left CheckpointFunction"):
            logits.argmax(-1)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of torch: the inner one
@pytest.mark.parametrize("inner", ["layer and head", "head"])
def test_checkpointing_reentrant_within_another(inner):
    """The inner checkpoint's tensors need no gradient while the outer one's forward runs."""
    model, tokens, _ = make()

    def body(x):
        if inner == "head":
            return checkpoint(model.lm_head, torch.tanh(model.mlp(x)), use_reentrant=True)
        return checkpoint(lambda x: model.lm_head(torch.tanh(model.mlp(x))), x, use_reentrant=True)

    with lowtide.defer_logits(model):
        logits = checkpoint(body, model.wte(tokens), use_reentrant=True)
        for use in (logits.sum, logits.materialize, lambda: F.cross_entropy(logits[0], tokens[0])):
            with pytest.raises(RuntimeError, match=r"have left CheckpointFunction"):
                use()


def test_checkpointing_reentrant_materialized():
    """They are there when the checkpoint ends, but without a gradient."""
    model, tokens, _ = make()
    with lowtide.defer_logits(model), warnings.catch_warnings():
        warnings.simplefilter("ignore", RealLogitsWarning)
        x = torch.tanh(model.mlp(model.wte(tokens)))

        def capped(x):
            logits = model.lm_head(x)
            logits.clamp_(-1, 1)
            return logits

        logits = checkpoint(capped, x, use_reentrant=True)
        for use in (logits.materialize, logits.sum):
            with pytest.raises(RuntimeError, match=r"have left CheckpointFunction"):
                use()


@pytest.mark.parametrize("what", ["loss", "real logits", "entropy"])
@pytest.mark.parametrize("before", [False, True])
def test_logits_made_real_beside_a_checkpoint(what, before):
    """Both runs of the checkpoint save the same tensors, whenever the logits become real."""
    model, tokens, targets = make()
    losses = {
        "loss": lambda z: F.cross_entropy(z.view(-1, V), targets.view(-1), ignore_index=-1),
        "real logits": lambda z: z.sin().sum(),
        "entropy": lambda z: -(z.softmax(-1) * z.log_softmax(-1)).sum(-1).mean(),
    }

    def gradients():
        model.zero_grad()
        logits = model(tokens)[0]
        if before:
            logits.std()
        loss = checkpoint(losses[what], logits, use_reentrant=False)
        logits.std()
        loss.backward()
        return [loss.detach(), *(each.grad.clone() for each in model.parameters())]

    expected = gradients()
    with lowtide.defer_logits(model), warnings.catch_warnings():
        warnings.simplefilter("ignore", RealLogitsWarning)
        close(gradients(), expected)


@pytest.mark.parametrize("change", ["__setitem__", "div_"])
def test_change_in_place_within_one_checkpoint(change):
    """Logits that the head makes in a checkpoint, and code changes there, change in both runs."""
    model, tokens, targets = make()

    def loss(tokens):
        logits = model(tokens)[0]
        if change == "div_":
            logits.div_(2)
        else:
            logits[..., 3] = -100
        return F.cross_entropy(logits.view(-1, V), targets.view(-1), ignore_index=-1)

    def gradients():
        model.zero_grad()
        value = checkpoint(loss, tokens, use_reentrant=False)
        value.backward()
        return [value.detach(), *(each.grad.clone() for each in model.parameters())]

    expected = gradients()
    with lowtide.defer_logits(model) as deferral, warnings.catch_warnings():
        warnings.simplefilter("ignore", RealLogitsWarning)
        close(gradients(), expected)
    # The division is recorded; the other change makes real logits in each run.
    assert sum(deferral.materialized.values()) == (0 if change == "div_" else 2)


def test_change_in_place_of_logits_made_outside_the_checkpoint():
    model, tokens, _ = make()
    with lowtide.defer_logits(model), warnings.catch_warnings():
        warnings.simplefilter("ignore", RealLogitsWarning)
        logits = model(tokens)[0]
        logits.sin()
        with pytest.raises(RuntimeError, match="clamp_ would change, in a checkpoint, logits"):
            checkpoint(lambda z: z.clamp_(-0.1, 0.1).sum(), logits, use_reentrant=False)
