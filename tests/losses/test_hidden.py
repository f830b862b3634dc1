"""sequence_log_probs and z_loss against log_softmax and logsumexp of all logits."""

import pytest
import torch

from lowtide import linear_cross_entropy
from lowtide.losses import sequence_log_probs, z_loss
from tests.losses import (
    DTYPES,
    B,
    V,
    check_against_eager,
    check_gradients,
    completions,
    head,
    language_leaves,
    leaves_in,
    logits,
    means,
    sums,
)


def make():
    return language_leaves(), {"target": completions(), "upstream": torch.randn(B)}


def fused_sums(leaves, constants):
    found_B = sequence_log_probs(
        leaves["input"], leaves["linear_weight"], constants["target"], **head(leaves)
    )
    return found_B @ constants["upstream"]


def dense_sums(leaves, constants):
    return sums(leaves, constants["target"]) @ constants["upstream"]


def fused_means(leaves, constants):
    found_B = sequence_log_probs(
        leaves["input"], leaves["linear_weight"], constants["target"], reduction="mean", **head(leaves)
    )
    return found_B @ constants["upstream"]


def dense_means(leaves, constants):
    counted = (constants["target"] != -100).any(1)
    rows = leaves | {"input": leaves["input"][counted]}
    return means(rows, constants["target"][counted]) @ constants["upstream"][counted]


def fused_z_loss(leaves, constants):
    return z_loss(leaves["input"], leaves["linear_weight"], constants["target"], **head(leaves))


def dense_z_loss(leaves, constants):
    return logits(leaves)[constants["target"] != -100].exp().sum(-1).log().square().mean()


CASES = [
    pytest.param(fused_sums, dense_sums, id="sum"),
    pytest.param(fused_means, dense_means, id="mean"),
    pytest.param(fused_z_loss, dense_z_loss, id="z_loss"),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("fused", "dense"), CASES)
@pytest.mark.usefixtures("on_device")
def test_accuracy_within_eager(fused, dense, dtype):
    check_against_eager(fused, dense, make, dtype)


@pytest.mark.parametrize(("fused", "dense"), CASES)
def test_gradcheck(fused, dense):
    check_gradients(fused, make)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_sequence_without_tokens(reduction, dtype):
    leaves, constants = make()
    leaves = leaves_in(leaves, dtype)
    found_B = sequence_log_probs(
        leaves["input"], leaves["linear_weight"], constants["target"], reduction=reduction, **head(leaves)
    )
    assert found_B[1].item() == 0
    assert (found_B[[0, 2, 3, 4, 5]] < 0).all()
    found_B.sum().backward()
    assert torch.equal(leaves["input"].grad[1], torch.zeros_like(leaves["input"].grad[1]))
    assert leaves["input"].grad[0].abs().sum() > 0
    assert all(leaf.grad.isfinite().all() for leaf in leaves.values())


@pytest.mark.parametrize("loss_of", [fused_sums, fused_means, fused_z_loss])
def test_no_valid_rows(loss_of):
    leaves, constants = make()
    leaves, constants["target"] = leaves_in(leaves, torch.float32), torch.full_like(constants["target"], -100)
    loss = loss_of(leaves, constants)
    loss.backward()
    assert loss.item() == 0
    for name, leaf in leaves.items():
        assert torch.equal(leaf.grad, torch.zeros_like(leaf)), name


def test_ignore_index_other():
    leaves, constants = make()
    own_BT = constants["target"].masked_fill(constants["target"] == -100, V + 5)
    arguments = leaves["input"], leaves["linear_weight"]
    for function, options in (
        (sequence_log_probs, {}),
        (sequence_log_probs, {"reduction": "mean"}),
        (z_loss, {}),
    ):
        want = function(*arguments, constants["target"], **options)
        assert torch.equal(function(*arguments, own_BT, ignore_index=V + 5, **options), want)


def test_ignore_index_default():
    leaves, constants = make()
    arguments = leaves["input"], leaves["linear_weight"], constants["target"]
    for function, options in (
        (sequence_log_probs, {}),
        (sequence_log_probs, {"reduction": "mean"}),
        (z_loss, {}),
    ):
        got = function(*arguments, ignore_index=None, **options)
        assert torch.equal(got, function(*arguments, **options))


def test_mean_over_valid_tokens():
    leaves, constants = make()
    arguments = leaves["input"], leaves["linear_weight"], constants["target"]
    mean_B, sum_B = (sequence_log_probs(*arguments, reduction=each) for each in ("mean", "sum"))
    torch.testing.assert_close(mean_B * torch.tensor([9.0, 1, 3, 6, 7, 1]), sum_B)


def test_z_loss_matches_linear_cross_entropy():
    leaves, constants = make()
    arguments = leaves["input"], leaves["linear_weight"], constants["target"]
    added = linear_cross_entropy(*arguments, z_loss=1.0) - linear_cross_entropy(*arguments)
    torch.testing.assert_close(z_loss(*arguments), added)


def test_errors():
    leaves, constants = make()
    arguments = leaves["input"], leaves["linear_weight"]
    with pytest.raises(ValueError, match="reduction must be one of 'sum', 'mean', got 'none'"):
        sequence_log_probs(*arguments, constants["target"], reduction="none")
    with pytest.raises(ValueError, match=r"\[B, T, D\], got \[9, 7\]; for one sequence, input\[None\]"):
        sequence_log_probs(leaves["input"][0], leaves["linear_weight"], constants["target"][0])
    with pytest.raises(ValueError, match=r"\[B, T, D\], got \[1, 6, 9, 7\]; flatten what comes before T"):
        sequence_log_probs(leaves["input"][None], leaves["linear_weight"], constants["target"][None])
    with pytest.raises(ValueError, match=r"target must have shape \[6, 9\].*got \[6, 8\]"):
        sequence_log_probs(*arguments, constants["target"][:, 1:])


def test_uint8_targets():
    """ignore_index = -100 is no byte: class 156 counts."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 3, 4), torch.randn(200, 4)
    target = torch.tensor([[156, 3, 4], [156, 156, 2]])
    for loss in (z_loss, lambda *of: sequence_log_probs(*of, reduction="mean")):
        torch.testing.assert_close(loss(hidden, weight, target.byte()), loss(hidden, weight, target))
