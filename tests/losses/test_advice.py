"""Arguments of other packages' losses, and calls that lack some, are answered with what to pass."""

import inspect
import re

import pytest
import torch

import lowtide
from lowtide import losses
from lowtide.losses import advice

X = torch.zeros(2)
CALLS = {
    "grpo": ((torch.zeros(2, 3), None, X, torch.ones(2, 3)), advice.POLICY),
    "dpo": ((X, X, X, X), advice.DPO),
    "simpo": ((X, X), advice.SIMPO),
    "orpo": ((X - 1, X - 1), advice.ORPO),
    "kto": ((X, X, X > 0, 0.0), advice.KTO),
    "info_nce": ((torch.eye(2), torch.eye(2)), advice.INFO_NCE),
    "contrastive": ((torch.eye(2), torch.eye(2)), advice.CONTRASTIVE),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_name_is_answered(name):
    given, instead = CALLS[name]
    function = getattr(losses, name)
    own = inspect.signature(function).parameters
    for other, advised in instead.items():
        assert other not in own
        with pytest.raises(TypeError, match=f"for {other} {re.escape(advised)}"):
            function(*given, **{other: 1})


@pytest.mark.parametrize("name", CALLS)
def test_advice_names_what_there_is(name):
    """The advice names arguments of this function, or of the one that is named behind them."""
    for advised in CALLS[name][1].values():
        if found := re.match(r"pass (\w+).*?(?: to (\w+))?(?:,|$)", advised):
            own = getattr(losses, found[2] or name, None) or getattr(lowtide, found[2])
            assert found[1] in inspect.signature(own).parameters, advised
        for other in re.findall(r"call (\w+)", advised):
            assert hasattr(losses, other)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: losses.dpo(X, X), "reference_rejected'; pass .* each of shape"),
        (lambda: losses.grpo(X, X), "missing 2 required .* torch.ones_like"),
        (lambda: losses.kto(X, X, X > 0), "'kl'; pass"),
        (lambda: losses.info_nce(torch.eye(2), torch.eye(2)), "'logit_scale'; pass .*logit_scale="),
        (lambda: losses.simpo(X, X, gama=1), "for gama pass gamma"),
        (lambda: losses.simpo(X, X, 2.0), "pass .policy_chosen, policy_rejected"),
        (lambda: losses.dpo(X, X, X, X, nothing=1), "for nothing pass one of policy_chosen"),
    ],
)
def test_misspelt_or_missing(call, message):
    with pytest.raises(TypeError, match=message):
        call()


def test_gspo_is_a_level():
    given, _ = CALLS["grpo"]
    with pytest.raises(ValueError, match="importance_sampling_level='sequence'"):
        losses.grpo(*given, loss_type="gspo")
    assert losses.grpo(*given, importance_sampling_level="sequence").item() == 0


def test_average_log_prob():
    with pytest.raises(TypeError, match='sequence_log_probs with reduction="mean"'):
        losses.sequence_log_probs(
            torch.randn(2, 3, 4), torch.randn(5, 4), torch.ones(2, 3).long(), average_log_prob=True
        )
