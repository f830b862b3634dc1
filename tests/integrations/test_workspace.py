"""The `workspace` of each callback is its deferral's: one too small is an error of the loss."""

from types import SimpleNamespace

import pytest
import torch

from tests.deferred.helpers import GPT, V

TOO_FEW = pytest.raises(ValueError, match=r"workspace must hold .*, got 64 bytes")


def steps(begin, workspace):
    """What runs with a callback that `begin` makes, calls and returns, and a model of its own."""
    model = GPT()
    tokens, targets = torch.randint(V, (2, 3, 7))
    callback = begin(model, workspace)
    loss = model(tokens, targets)[1]
    loss.backward()
    assert callback.fused == 1


def transformers_callback(model, workspace):
    pytest.importorskip("transformers")
    from lowtide.integrations.transformers import TransformersDeferralCallback

    callback = TransformersDeferralCallback(workspace=workspace)
    callback.on_train_begin(SimpleNamespace(), None, None, model=model)
    return callback


def lightning_callback(model, workspace):
    pytest.importorskip("lightning")
    from lowtide.integrations.lightning import LightningDeferralCallback

    callback = LightningDeferralCallback(workspace=workspace)
    callback.on_fit_start(None, model)
    return callback


@pytest.mark.parametrize("begin", [transformers_callback, lightning_callback])
def test_workspace_of_trainer_callbacks(begin):
    steps(begin, 2**20)
    steps(begin, None)
    with TOO_FEW:
        steps(begin, 64)


def test_workspace_is_checked_when_a_callback_is_made():
    pytest.importorskip("transformers")
    from lowtide.integrations.transformers import TransformersDeferralCallback

    with pytest.raises(TypeError, match="workspace"):
        TransformersDeferralCallback(workspace="1GB")


@pytest.mark.parametrize("of_reference", [False, True])
def test_workspace_of_trl_callback(of_reference):
    pytest.importorskip("trl")
    from lowtide.integrations.trl import TRLDeferralCallback

    def prepared():
        """As a trainer of TRL leaves it: with a forward of its own."""
        model = GPT()
        own = model.forward
        model.forward = lambda tokens, use_cache: SimpleNamespace(logits=own(tokens)[0])
        return model

    def step(workspace):
        model, reference = prepared(), prepared()
        callback = TRLDeferralCallback(reference, workspace=workspace)
        callback.on_train_begin(SimpleNamespace(), None, None, model=model)
        tokens = torch.randint(V, (3, 7))
        asked = reference if of_reference else model
        return asked(tokens, labels=tokens, fused_lm_head=True).loss

    expected = torch.log(torch.tensor(V)).item()
    assert step(2**20).item() == pytest.approx(expected, rel=0.5)
    with TOO_FEW:
        step(64)
