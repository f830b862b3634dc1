"""Accelerate's prepare, before and after a deferral: losses and gradients of the old loop."""

import copy

import pytest
import torch
from torch import nn

import lowtide
from tests.deferred.helpers import B, V, differentiated, make, norm, within_eager

accelerate = pytest.importorskip("accelerate")
from accelerate.state import AcceleratorState  # noqa: E402


def accumulated(model, defer, precision, tokens, targets):
    """(losses and gradients of two batches, the deferral)"""
    AcceleratorState._reset_state(reset_partial_state=True)  # otherwise the precision of the last test stays
    accelerator = accelerate.Accelerator(
        cpu=True,
        mixed_precision=precision,
        gradient_accumulation_steps=2,
        step_scheduler_with_optimizer=False,
    )
    model = copy.deepcopy(model)
    deferral = lowtide.defer_logits(model) if defer == "before" else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    deferral = lowtide.defer_logits(prepared) if defer == "after" else deferral
    criterion, losses = nn.CrossEntropyLoss(ignore_index=-1), []
    for batch, labels in zip(tokens, targets):
        with accelerator.accumulate(prepared):
            logits, _ = prepared(batch)
            loss = criterion(logits.view(-1, V), labels.view(-1))
            accelerator.backward(loss)
            losses.append(loss.detach())
            gradients = [each.grad.clone() for each in model.parameters()]
            accelerator.clip_grad_norm_(prepared.parameters(), 1e9)
            optimizer.step()
            optimizer.zero_grad()
    assert type(accelerator.unwrap_model(prepared)) is type(model)
    return [*losses, *gradients], deferral


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("defer", ["before", "after"])
def test_training_loop(defer, precision):
    model, _, _ = make(dtype=torch.float32)
    tokens, targets = torch.randint(V, (2, 2, B, 7))
    targets[:, :, 1] = -1
    eager, _ = accumulated(model, None, precision, tokens, targets)
    exact, _ = accumulated(model.double(), None, "no", tokens, targets)
    found, deferral = accumulated(model.float(), defer, precision, tokens, targets)
    assert (deferral.fused, deferral.materialized) == (2, {})
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    for ours, theirs, want in zip(found, eager, exact):
        within_eager(ours, theirs, want, dtype, size=8 * norm(want))


def test_hooks_on_head():
    """They put a forward on the module itself, past which a deferral would not be called; and leave
    the class's own there."""
    model, tokens, targets = make(dtype=torch.float32)
    expected = differentiated(model, model(tokens, targets)[1])
    accelerate.hooks.add_hook_to_module(model.lm_head, accelerate.hooks.ModelHook())
    with pytest.raises(ValueError, match=r"replaced the forward .*accelerate's hooks do so.*remove it"):
        lowtide.defer_logits(model)
    accelerate.hooks.remove_hook_from_module(model.lm_head)
    for stays in (False, True):
        with lowtide.defer_logits(model) as deferral:
            accelerate.hooks.add_hook_to_module(model.lm_head, accelerate.hooks.ModelHook())
            found = differentiated(model, model(tokens, targets)[1])
            if not stays:
                accelerate.hooks.remove_hook_from_module(model.lm_head)
        assert (deferral.fused, deferral.materialized) == (1, {})
        for ours, want in zip(found, expected):
            torch.testing.assert_close(ours, want)
        assert isinstance(model(tokens)[0], torch.Tensor)
