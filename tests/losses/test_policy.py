"""GRPO and its relatives against loops over the tokens that count."""

import itertools
import math

import pytest
import torch

import lowtide
from lowtide.losses import grpo
from tests.losses import (
    DTYPES,
    B,
    check_against_eager,
    check_gradients,
    completions,
    head,
    language_leaves,
    token_log_probs,
)

LENGTH = 12  # the length that Dr. GRPO divides by


def make():
    """An older policy and a reference nearby: some ratios are clipped on either side."""
    leaves, target_BT = language_leaves(), completions()
    old_BT, reference_BT = (token_log_probs(nearby(leaves), target_BT) for _ in range(2))
    advantages_B = torch.tensor([1.0, 2.0, -1.5, 0.7, -0.4, 1.1])
    constants = {"target": target_BT, "old": old_BT, "reference": reference_BT, "advantages": advantages_B}
    return leaves, constants


def nearby(leaves):
    return leaves | {
        "linear_weight": leaves["linear_weight"] + 0.15 * torch.randn_like(leaves["linear_weight"])
    }


def length(loss_type):
    return {"max_completion_length": LENGTH} if loss_type == "dr_grpo" else {}


def fused(level, loss_type, kl):
    def loss_of(leaves, constants):
        target_BT = constants["target"]
        found = lowtide.linear_log_probs(leaves["input"], leaves["linear_weight"], target_BT, **head(leaves))
        return grpo(
            found.log_prob,
            constants["old"],
            constants["advantages"],
            target_BT != -100,
            reference=constants["reference"] if kl else None,
            beta=0.3 if kl else None,
            epsilon=0.1,
            epsilon_high=0.15,
            importance_sampling_level=level,
            loss_type=loss_type,
            **length(loss_type),
        )

    return loss_of


def dense(level, loss_type, kl):
    def loss_of(leaves, constants):
        log_prob_BT = token_log_probs(leaves, constants["target"])
        losses = []  # per sequence, those of its tokens
        for i, advantage in enumerate(constants["advantages"]):
            tokens = (constants["target"][i] != -100).nonzero()[:, 0]
            if len(tokens) == 0:
                losses.append(log_prob_BT.new_zeros(0))
                continue
            log_prob, old = log_prob_BT[i, tokens], constants["old"][i, tokens]
            ratio = log_prob.exp() / old.exp()
            if level == "sequence":
                ratio = ratio.prod().pow(1 / len(tokens)).expand(len(tokens))
            clipped = ratio.clamp(0.9, 1.15)
            surrogate = torch.where(
                ratio * advantage < clipped * advantage, ratio * advantage, clipped * advantage
            )
            loss = -surrogate
            if kl:
                inverse = constants["reference"][i, tokens].exp() / log_prob.exp()
                loss = loss + 0.3 * (inverse - inverse.log() - 1)
            losses.append(loss)
        if loss_type == "grpo":
            return torch.stack([loss.sum() / max(len(loss), 1) for loss in losses]).sum() / B
        if loss_type == "dapo":
            return torch.cat(losses).mean()
        return torch.cat(losses).sum() / (B * LENGTH)

    return loss_of


VARIANTS = list(itertools.product(["token", "sequence"], ["grpo", "dapo", "dr_grpo"], [False, True]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.usefixtures("on_device")
def test_accuracy_within_eager(variant, dtype):
    check_against_eager(fused(*variant), dense(*variant), make, dtype)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_gradcheck(variant):
    check_gradients(fused(*variant), make)


def test_cases_clip():
    leaves, constants = make()
    counted_BT = constants["target"] != -100
    ratio = (token_log_probs(leaves, constants["target"]) - constants["old"]).exp()[counted_BT]
    assert (ratio < 0.9).any()
    assert (ratio > 1.15).any()
    assert ((ratio > 0.9) & (ratio < 1.15)).any()


# Numbers that can be worked out by hand, on log-probabilities alone.


def one_token(log_ratio, advantage, **options):
    """The loss and the gradient of a single token whose old log-probability is -1."""
    policy = torch.tensor([[-1.0 + log_ratio]], requires_grad=True)
    loss = grpo(policy, torch.tensor([[-1.0]]), torch.tensor([advantage]), torch.tensor([[True]]), **options)
    loss.backward()
    return loss.item(), policy.grad.item()


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_clipping(level):
    options = {"epsilon": 0.2, "epsilon_high": 0.3, "importance_sampling_level": level}
    up, down = math.log(1.5), math.log(0.5)
    assert one_token(up, 2.0, **options) == pytest.approx((-1.3 * 2, 0.0))
    assert one_token(up, -2.0, **options) == pytest.approx((1.5 * 2, 1.5 * 2))
    assert one_token(down, 2.0, **options) == pytest.approx((-0.5 * 2, -0.5 * 2))
    assert one_token(down, -2.0, **options) == pytest.approx((0.8 * 2, 0.0))
    assert one_token(0.0, 2.0, **options) == pytest.approx((-2.0, -2.0))
    assert one_token(up, 2.0, epsilon=0.25, importance_sampling_level=level)[0] == pytest.approx(-2.5)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_large_values(level):
    options = {"importance_sampling_level": level}
    assert one_token(1000.0, 1.0, **options) == pytest.approx((-1.2, 0.0))
    assert one_token(1000.0, -1.0, **options) == pytest.approx((math.exp(20), 0.0))
    assert one_token(19.0, -1.0, **options) == pytest.approx((math.exp(19), math.exp(19)))
    assert one_token(-1000.0, 1.0, **options) == pytest.approx((0.0, 0.0))
    assert one_token(-1000.0, -1.0, **options) == pytest.approx((0.8, 0.0))


def test_kl_large_and_small_values():
    def kl(d):
        return one_token(0.0, 0.0, reference=torch.tensor([[-1.0 + d]]), beta=1.0)

    assert kl(-1000.0) == pytest.approx((999.0, 1.0))
    assert kl(1000.0) == pytest.approx((math.exp(20) - 21, 0.0))
    assert kl(2.0) == pytest.approx((math.exp(2) - 3, 1 - math.exp(2)))
    assert kl(0.0) == (0.0, 0.0)
    value, gradient = kl(2.0**-12)  # d²/2; exp(d) - 1 - d would have lost half its digits
    assert value == pytest.approx(2.0**-25, rel=1e-2)
    assert gradient == pytest.approx(-(2.0**-12), rel=1e-3)


def test_no_old_policy_is_reinforce():
    policy_BT = torch.randn(3, 5, requires_grad=True)
    mask_BT = torch.ones(3, 5, dtype=torch.bool)
    advantages_B = torch.tensor([1.0, -2.0, 0.5])
    loss = grpo(policy_BT, None, advantages_B, mask_BT, epsilon=0.0)
    torch.testing.assert_close(loss, -advantages_B.mean())
    loss.backward()
    torch.testing.assert_close(policy_BT.grad, (-advantages_B / 15)[:, None].expand(3, 5))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_masked_never_read(loss_type, level):
    leaves, constants = make()
    counted_BT = constants["target"] != -100
    policy_BT = token_log_probs(leaves, constants["target"])
    options = {
        "importance_sampling_level": level,
        "loss_type": loss_type,
        **length(loss_type),
    }
    results = []
    for rubbish in (0.0, float("nan"), float("-inf"), 1e30):
        given = [t.detach().masked_fill(~counted_BT, rubbish) for t in (policy_BT, constants["old"])]
        reference_BT = constants["reference"].masked_fill(~counted_BT, rubbish)
        given[0].requires_grad_()
        loss = grpo(*given, constants["advantages"], counted_BT.int(), reference=reference_BT, **options)
        loss.backward()
        assert torch.equal(given[0].grad[~counted_BT], torch.zeros(int((~counted_BT).sum())))
        assert (given[0].grad[counted_BT] != 0).any()
        results.append((loss, given[0].grad))
    for loss, gradient in results[1:]:
        assert torch.equal(loss, results[0][0])
        assert torch.equal(gradient, results[0][1])


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_no_valid_rows(loss_type):
    policy_BT = torch.randn(2, 3, requires_grad=True)
    mask_BT = torch.zeros(2, 3, dtype=torch.bool)
    loss = grpo(policy_BT, None, torch.ones(2), mask_BT, loss_type=loss_type, **length(loss_type))
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(policy_BT.grad, torch.zeros(2, 3))


@pytest.mark.parametrize("number", [20, torch.tensor(20), torch.tensor(20.0, dtype=torch.float64)])
def test_halves_with_shared_token_count_match_whole(number):
    leaves, constants = make()
    counted_BT = constants["target"] != -100
    policy_BT, old_BT = token_log_probs(leaves, constants["target"]), constants["old"]
    given = policy_BT, old_BT, constants["advantages"], counted_BT
    whole = grpo(*given, loss_type="dapo", num_items_in_batch=number)
    assert torch.equal(whole, grpo(*given, loss_type="dapo", num_items_in_batch=20))
    halves = [
        grpo(*(each[rows] for each in given), loss_type="dapo", num_items_in_batch=number)
        for rows in (slice(0, 2), slice(2, B))
    ]
    torch.testing.assert_close(halves[0] + halves[1], whole)
    own = grpo(*given, loss_type="dapo")
    torch.testing.assert_close(own * counted_BT.sum(), whole * 20)


def test_old_and_reference_take_no_gradient():
    policy, old, reference = (torch.randn(2, 3, requires_grad=True) for _ in range(3))
    grpo(policy, old, torch.ones(2), torch.ones(2, 3), reference=reference).backward()
    assert policy.grad.abs().sum() > 0
    assert old.grad is None
    assert reference.grad is None


def test_beta_default():
    policy_BT, reference_BT = torch.randn(2, 2, 3)
    given = policy_BT, None, torch.ones(2), torch.ones(2, 3)
    own = grpo(*given, reference=reference_BT)
    assert torch.equal(own, grpo(*given, reference=reference_BT, beta=0.04))
    assert own > grpo(*given, reference=reference_BT, beta=0.0)
    assert torch.equal(grpo(*given), grpo(*given, beta=0.0))


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"policy": torch.ones(2)}, ValueError, r"policy must have shape \[B, T\], got \[2\]"),
        ({"old": torch.ones(2, 1)}, ValueError, r"old must have shape \[2, 3\], got \[2, 1\]"),
        ({"reference": torch.ones(1, 3)}, ValueError, r"reference must have shape \[2, 3\], got \[1, 3\]"),
        ({"advantages": torch.ones(2, 1)}, ValueError, r"advantages must have shape \[2\], got \[2, 1\]"),
        ({"mask": torch.ones(2)}, ValueError, r"mask must have shape \[2, 3\], got \[2\]"),
        ({"old": torch.ones(2, 3).long()}, TypeError, "old must be a floating-point .* got torch.int64"),
        ({"loss_type": "bnpo"}, ValueError, "loss_type 'bnpo' is 'dapo' here, without num_items_in_batch"),
        ({"loss_type": "ppo"}, ValueError, "loss_type must be one of 'grpo', 'dapo', 'dr_grpo', got 'ppo'"),
        (
            {"num_items_in_batch": 4},
            ValueError,
            "num_items_in_batch is for loss_type='dapo' alone, got it with 'grpo'; leave it out",
        ),
        (
            {"num_items_in_batch": 4, "loss_type": "dr_grpo", "max_completion_length": 3},
            ValueError,
            "num_items_in_batch is for loss_type='dapo' alone, got it with 'dr_grpo'",
        ),
        (
            {"max_completion_length": 4, "loss_type": "dapo"},
            ValueError,
            "max_completion_length is for loss_type='dr_grpo' alone, got it with 'dapo'; leave it out",
        ),
        (
            {"beta": 0.1},
            ValueError,
            "beta .*needs reference, got beta=0.1 .*pass reference, or leave beta out",
        ),
        ({"mask": None}, TypeError, r"mask must be .* \[2, 3\], got NoneType; .*torch.ones_like\(policy"),
        ({"advantages": [1.0, 2.0]}, TypeError, r"advantages must be a torch.Tensor .* \[2\], got list"),
        ({"loss_type": "dr_grpo"}, ValueError, "max_completion_length must be .* got None"),
        ({"importance_sampling_level": "word"}, ValueError, "importance_sampling_level must be .* 'word'"),
    ],
)
def test_errors(change, kind, message):
    given = {
        "policy": torch.ones(2, 3),
        "old": torch.ones(2, 3),
        "advantages": torch.ones(2),
        "mask": torch.ones(2, 3),
    }
    with pytest.raises(kind, match=message):
        grpo(**(given | change))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"loss_type": "dapo", "num_items_in_batch": torch.tensor([2.0])},
            "num_items_in_batch must be a number",
        ),
        (
            {"loss_type": "dapo", "num_items_in_batch": -2},
            "num_items_in_batch must be a finite number above 0",
        ),
        (
            {"loss_type": "dapo", "num_items_in_batch": 0},
            "num_items_in_batch must be a finite number above 0",
        ),
        (
            {"loss_type": "dapo", "num_items_in_batch": torch.tensor(2.0, requires_grad=True)},
            "num_items_in_batch",
        ),
        ({"loss_type": "dr_grpo", "max_completion_length": -2}, "max_completion_length must be a number of"),
        ({"epsilon": -0.2}, "epsilon must be a number of at least 0, got -0.2"),
        ({"epsilon_high": math.nan}, "epsilon_high must be a number of at least 0, got nan"),
        ({"epsilon": "0.2"}, "epsilon must be a float"),
        ({"beta": "0.2"}, "beta must be a float"),
    ],
)
def test_refused_numbers(options, message):
    policy = torch.full((1, 2), -1.0, requires_grad=True)
    with pytest.raises((ValueError, TypeError), match=message):
        grpo(policy, None, torch.ones(1), torch.ones(1, 2), **options)
