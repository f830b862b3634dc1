"""Autocast and loss scales, beside the same steps without the deferral."""

import copy

import pytest
import torch
import torch.nn.functional as F

import lowtide
from tests.deferred.helpers import V, differentiated, make, norm, plain_and_deferred, within_eager


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("where", ["around the model", "around the model, then float", "around all"])
def test_autocast(where, half):
    """The loss is often formed where autocast is off again; the head's product keeps its dtype."""
    model, tokens, targets = make(dtype=torch.float32)

    def use(model):
        with torch.autocast("cpu", dtype=half):
            logits, loss = model(tokens, targets)
        assert logits.dtype == half
        if where == "around all":
            return loss
        if "float" in where:  # as accelerate does with outputs
            logits = logits.float()
        return F.cross_entropy(logits.view(-1, V), targets.view(-1), ignore_index=-1)

    expected, found, deferral = plain_and_deferred(model, use)
    assert deferral.materialized == {}
    wide = copy.deepcopy(model).double()
    exact = differentiated(wide, wide(tokens, targets)[1])
    for ours, eager, want in zip(found, expected, exact):
        within_eager(ours, eager, want, half)


def test_float16_with_grad_scaler():
    """Steps that are taken, of gradients that would be 0 in float16 without the scaler."""
    model, tokens, targets = make(dtype=torch.float32)

    def trained(model, deferred, half=True):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, enabled=half)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e4)
        deferral = lowtide.defer_logits(model) if deferred else None
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.float16, enabled=half):
                loss = model(tokens, targets)[1] * 1e-4
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scaler.get_scale() == (2.0**16 if half else 1.0)
        assert deferral is None or (deferral.fused, deferral.materialized) == (2, {})
        return [each.detach() for each in model.parameters()]

    exact = trained(copy.deepcopy(model).double(), False, half=False)
    eager, found = trained(copy.deepcopy(model), False), trained(copy.deepcopy(model), True)
    for ours, theirs, want, start in zip(found, eager, exact, model.parameters()):
        assert norm(want - start) > 0
        within_eager(*(each.detach() - start.detach() for each in (ours, theirs, want)), torch.float16)


def test_autocast_disabled_inside():
    model, tokens, _ = make(dtype=torch.float32)
    with lowtide.defer_logits(model), torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = torch.tanh(model.mlp(model.wte(tokens)))
        with torch.autocast("cpu", enabled=False):
            logits = model.lm_head(hidden.float())
        assert logits.dtype == torch.float32
        exact = hidden.float().double() @ model.lm_head.weight.double().t()
        found = logits.logsumexp(-1)
    within_eager(found, exact.float().logsumexp(-1), exact.logsumexp(-1), torch.float32, size=norm(exact))
