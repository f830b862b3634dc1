"""DPO, SimPO, ORPO and KTO against their papers' formulas, on plain log_softmax."""

import math

import pytest
import torch

from lowtide.losses import dpo, kto, orpo, sequence_log_probs, simpo
from tests.losses import (
    DTYPES,
    B,
    check_against_eager,
    check_gradients,
    completions,
    head,
    language_leaves,
    means,
    sums,
)


def make():
    """Chosen sequences, then rejected; the reference is not far from the policy."""
    leaves, target_BT = language_leaves(), completions()
    reference_B = sums(leaves, target_BT) + 3 * torch.randn(B)
    return leaves, {"target": target_BT, "reference": reference_B, "kl": torch.randn(4) + 1.5}


def make_with_tokens():
    """As make, each sequence with at least one token: p = 1 has no odds."""
    leaves, constants = make()
    constants["target"][1, 4:6] = 3
    return leaves, constants


def policy(leaves, constants, reduction="sum"):
    return sequence_log_probs(
        leaves["input"], leaves["linear_weight"], constants["target"], reduction=reduction, **head(leaves)
    )


def fused_dpo(leaves, constants):
    return dpo(*policy(leaves, constants).chunk(2), *constants["reference"].chunk(2), beta=0.3)


def fused_cdpo(leaves, constants):
    pairs = *policy(leaves, constants).chunk(2), *constants["reference"].chunk(2)
    return dpo(*pairs, beta=0.3, label_smoothing=0.2)


def preference(leaves, constants):
    """DPO's p(chosen > rejected) = exp(β r_w) / (exp(β r_w) + exp(β r_l)), r the log-ratios."""
    chosen, rejected = (0.3 * (sums(leaves, constants["target"]) - constants["reference"])).exp().chunk(2)
    return chosen / (chosen + rejected)


def dense_dpo(leaves, constants):
    return -preference(leaves, constants).log().mean()


def dense_cdpo(leaves, constants):
    p = preference(leaves, constants)
    return -(0.8 * p.log() + 0.2 * (1 - p).log()).mean()


def fused_simpo(leaves, constants):
    return simpo(*policy(leaves, constants, "mean").chunk(2), beta=2.5, gamma=1.2)


def dense_simpo(leaves, constants):
    chosen, rejected = means(leaves, constants["target"]).chunk(2)
    return -(1 / (1 + (-(2.5 * chosen - 2.5 * rejected - 1.2)).exp())).log().mean()


def fused_orpo(leaves, constants):
    return orpo(*policy(leaves, constants, "mean").chunk(2), beta=0.4)


def dense_orpo(leaves, constants):
    chosen, rejected = means(leaves, constants["target"]).exp().chunk(2)  # the probabilities themselves
    odds_ratio = chosen / (1 - chosen) / (rejected / (1 - rejected))
    return (-chosen.log() + 0.4 * -(odds_ratio / (1 + odds_ratio)).log()).mean()


LABEL = [True, False, False, True, True, False]


def fused_kto(leaves, constants):
    return kto(
        policy(leaves, constants),
        constants["reference"],
        torch.tensor(LABEL),
        constants["kl"],
        beta=0.3,
        desirable_weight=1.5,
        undesirable_weight=0.7,
    )


def dense_kto(leaves, constants):
    r_B = sums(leaves, constants["target"]) - constants["reference"]
    baseline = max(constants["kl"].mean().item(), 0)
    terms = []
    for r, desirable in zip(r_B, LABEL):
        if desirable:
            terms.append(1.5 - 1.5 * (0.3 * (r - baseline)).sigmoid())
        else:
            terms.append(0.7 - 0.7 * (0.3 * (baseline - r)).sigmoid())
    return torch.stack(terms).mean()


CASES = [
    pytest.param(fused_dpo, dense_dpo, make, id="dpo"),
    pytest.param(fused_cdpo, dense_cdpo, make, id="cdpo"),
    pytest.param(fused_simpo, dense_simpo, make_with_tokens, id="simpo"),
    pytest.param(fused_orpo, dense_orpo, make_with_tokens, id="orpo"),
    pytest.param(fused_kto, dense_kto, make, id="kto"),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("fused", "dense", "draw"), CASES)
@pytest.mark.usefixtures("on_device")
def test_accuracy_within_eager(fused, dense, draw, dtype):
    check_against_eager(fused, dense, draw, dtype)


@pytest.mark.parametrize(("fused", "dense", "draw"), CASES)
def test_gradcheck(fused, dense, draw):
    check_gradients(fused, draw)


# Numbers that can be worked out by hand, on log-probabilities alone.


def leaf(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("smoothing", [0.0, 0.25])
def test_dpo_large_values(smoothing):
    chosen, rejected = leaf(0.0, -1000.0, -5.0), leaf(-1000.0, 0.0, -5.0)
    zeros = torch.zeros(3)
    loss = dpo(chosen, rejected, zeros, zeros, beta=1.0, label_smoothing=smoothing, reduction="none")
    want = [1000 * smoothing, 1000 * (1 - smoothing), math.log(2)]
    torch.testing.assert_close(loss, torch.tensor(want))
    loss.sum().backward()
    gradient = torch.tensor([smoothing, smoothing - 1, smoothing - 0.5])
    torch.testing.assert_close(chosen.grad, gradient)
    torch.testing.assert_close(rejected.grad, -gradient)


def test_simpo_large_values():
    chosen, rejected = leaf(0.0, -1000.0, -2.0), leaf(-1000.0, 0.0, -2.5)
    loss = simpo(chosen, rejected, beta=2.0, gamma=1.0, reduction="none")
    torch.testing.assert_close(loss, torch.tensor([0.0, 2001.0, math.log(2)]))
    loss.sum().backward()
    torch.testing.assert_close(chosen.grad, torch.tensor([0.0, -2.0, -1.0]))
    torch.testing.assert_close(rejected.grad, torch.tensor([0.0, 2.0, 1.0]))


def test_kto_large_values():
    policy_B, zeros = leaf(1000.0, 1000.0, -1000.0, -1000.0, 0.0), torch.zeros(5)
    label = torch.tensor([True, False, True, False, True])
    loss = kto(policy_B, zeros, label, torch.zeros(()), beta=1.0, undesirable_weight=2.0, reduction="none")
    torch.testing.assert_close(loss, torch.tensor([0.0, 2.0, 1.0, 0.0, 0.5]))
    loss.sum().backward()
    torch.testing.assert_close(policy_B.grad, torch.tensor([0.0, 0.0, 0.0, 0.0, -0.25]))


def test_kto_small_loss_digits():
    """1 - sigmoid(30) is 0 in float32."""
    policy_B = leaf(30.0)
    loss = kto(policy_B, torch.zeros(1), torch.tensor([True]), torch.zeros(()), beta=1.0)
    torch.testing.assert_close(loss, torch.tensor(math.exp(-30)), rtol=1e-5, atol=0)
    loss.backward()
    torch.testing.assert_close(policy_B.grad, torch.tensor([-math.exp(-30)]), rtol=1e-5, atol=0)


def test_kto_baseline_detached_and_nonnegative():
    policy_B, kl = leaf(0.7, -0.3), leaf(1.0, 2.0)
    label = torch.tensor([True, False])
    above = kto(policy_B, torch.zeros(2), label, kl, beta=1.0, reduction="none")
    sigmoid = torch.sigmoid(torch.tensor([1.5 - 0.7, -0.3 - 1.5]))
    torch.testing.assert_close(above, sigmoid)
    above.sum().backward()
    assert kl.grad is None
    below = kto(policy_B, torch.zeros(2), label, -kl, beta=1.0)
    assert torch.equal(below, kto(policy_B, torch.zeros(2), label, torch.zeros(()), beta=1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kto_baseline_number(dtype):
    policy_B, label = leaf(0.7, -0.3, dtype=dtype), torch.tensor([True, False])
    got = kto(policy_B, torch.zeros_like(policy_B), label, 0.1)
    assert got.dtype == dtype
    want = kto(policy_B, torch.zeros_like(policy_B), label, torch.tensor(0.1, dtype=dtype))
    assert torch.equal(got, want)


def test_orpo_large_values():
    """The odds of e^-1000 are e^-1000; those of p = 1 - 1e-30 are 1e30."""
    chosen, rejected = leaf(-1000.0, -1e-30), leaf(-1e-30, -1000.0)
    loss = orpo(chosen, rejected, beta=1.0, reduction="none")
    log_odds_ratio = 1000 + 30 * math.log(10)
    torch.testing.assert_close(loss, torch.tensor([1000 + log_odds_ratio, 0.0]))
    loss.sum().backward()
    torch.testing.assert_close(chosen.grad, torch.tensor([-2.0, -1.0]))
    torch.testing.assert_close(rejected.grad, torch.tensor([1e30, 0.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_orpo_no_tokens(dtype):
    chosen, rejected = leaf(0.0, -1.0, 0.0, dtype=dtype), leaf(-1.0, 0.0, 0.0, dtype=dtype)
    loss = orpo(chosen, rejected, beta=0.1, reduction="none")
    assert loss.isfinite().all()
    assert loss[2].item() == pytest.approx(0.1 * math.log(2))
    loss.sum().backward()
    assert chosen.grad[0] == chosen.grad[2] == -1, "of the likelihood alone"
    assert rejected.grad[1] == rejected.grad[2] == 0
    assert chosen.grad.isfinite().all()
    assert rejected.grad.isfinite().all()


@pytest.mark.parametrize(("fused", "dense", "draw"), CASES)
def test_empty_pair_no_nan(fused, dense, draw):
    leaves, constants = make()
    constants["target"][4] = -100  # and row 1: chosen and rejected of one pair
    leaves = {name: tensor.requires_grad_() for name, tensor in leaves.items()}
    loss = fused(leaves, constants)
    loss.backward()
    assert loss.isfinite()
    for name, each in leaves.items():
        assert each.grad.isfinite().all(), name
    assert torch.equal(leaves["input"].grad[[1, 4]], torch.zeros_like(leaves["input"][[1, 4]]))
    assert leaves["input"].grad[0].abs().sum() > 0


def test_reductions():
    pair = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.5, -1.0, -3.0])
    zeros = torch.zeros(3)
    for loss_of in (
        lambda reduction: dpo(*pair, zeros, zeros, reduction=reduction),
        lambda reduction: simpo(*pair, reduction=reduction),
        lambda reduction: orpo(*pair, reduction=reduction),
        lambda reduction: kto(pair[0], zeros, pair[1] < -1, zeros, reduction=reduction),
    ):
        rows = loss_of("none")
        assert rows.shape == (3,)
        torch.testing.assert_close(loss_of("mean"), rows.sum() / 3)
        torch.testing.assert_close(loss_of("sum"), rows.sum())
        with pytest.raises(ValueError, match="reduction must be one of 'mean', 'sum', 'none', got 'max'"):
            loss_of("max")


def test_reference_takes_no_gradient():
    values = [leaf(-1.0, -2.0) for _ in range(4)]
    dpo(*values).backward()
    assert [value.grad is None for value in values] == [False, False, True, True]
    policy_B, reference_B = leaf(-1.0, -2.0), leaf(-1.0, -2.0)
    kto(policy_B, reference_B, torch.tensor([True, False]), torch.zeros(())).backward()
    assert policy_B.grad.abs().sum() > 0
    assert reference_B.grad is None


def test_half_precision_widened():
    half = [torch.tensor([-300.0, -17.0]).bfloat16() + k for k in range(4)]
    got = dpo(*half)
    assert got.dtype == torch.float32
    assert torch.equal(got, dpo(*(each.float() for each in half)))


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (
            lambda b: dpo(b, b, b, b[:, None]),
            ValueError,
            r"reference_rejected must have shape \[B\], got \[3, 1\]",
        ),
        (lambda b: dpo(b, b, b[:2], b), ValueError, r"reference_chosen must have shape \[3\], got \[2\]"),
        (lambda b: simpo(b[None], b[None]), ValueError, r"policy_chosen must have shape \[B\], got \[1, 3\]"),
        (
            lambda b: orpo(b, b.long()),
            TypeError,
            "policy_rejected must be a floating-point .* got torch.int64",
        ),
        (lambda b: orpo(b, 3.0), TypeError, "policy_rejected must be a floating-point .* got float"),
        (
            lambda b: dpo(b, b, b, b, label_smoothing=0.6),
            ValueError,
            r"label_smoothing .*\[0, 0.5\], got 0.6",
        ),
        (lambda b: kto(b, b, b, b), TypeError, "label must be bool.* got torch.float32; .*pass label == 1"),
        (
            lambda b: kto(b, b, [True, False, True], b),
            TypeError,
            r"label must be .*\[3\], got list; pass torch.tensor\(label\)",
        ),
        (lambda b: kto(b, b, b > 0, None), TypeError, "kl must be a torch.Tensor or a float, got NoneType"),
        (lambda b: kto(b, b, b[:2] > 0, b), ValueError, r"label must have shape \[3\], got \[2\]"),
        (lambda b: kto(b, b, b > 0, b[:0]), ValueError, r"kl must have shape \[M\].*got \[0\]"),
    ],
)
def test_errors(call, kind, message):
    with pytest.raises(kind, match=message):
        call(torch.zeros(3))


@pytest.mark.parametrize(
    ("loss", "tensors", "options"),
    [
        (dpo, 4, {"beta": "x"}),
        (dpo, 4, {"label_smoothing": "x"}),
        (simpo, 2, {"gamma": "x"}),
        (orpo, 2, {"beta": "x"}),
        (kto, 2, {"beta": "x", "label": torch.ones(3, dtype=torch.bool), "kl": 0.0}),
    ],
)
def test_refused_numbers(loss, tensors, options):
    with pytest.raises(TypeError, match=r"must be a float, got 'x'"):
        loss(*[-torch.ones(3)] * tensors, **options)


def test_refused_complex_kl():
    label, kl = torch.ones(3, dtype=torch.bool), torch.zeros(2, dtype=torch.complex64)
    with pytest.raises(TypeError, match="kl must hold real numbers"):
        kto(-torch.ones(3), -torch.ones(3), label, kl)
