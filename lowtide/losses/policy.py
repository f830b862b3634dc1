"""Compute policy-gradient losses from the log-probabilities of sampled tokens."""

from typing import Literal

import torch
from torch import Tensor

from lowtide.core.checks import check_choice
from lowtide.core.errors import ArgumentError, advises
from lowtide.losses import advice
from lowtide.losses.common import check_numbers, check_shape, widened
from lowtide.ops.linear_cross_entropy.definition.head import number_beside
from lowtide.ops.linear_cross_entropy.definition.validation import check_divisor

LARGEST_LOG_RATIO = 20.0  # e^20 is beyond any useful step, and its square is far from overflow


@advises(advice.POLICY, advice.USAGE_OF_POLICY)
def grpo(
    policy: Tensor,
    old: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    reference: Tensor | None = None,
    beta: float | None = None,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    importance_sampling_level: Literal["token", "sequence"] = "token",
    loss_type: Literal["grpo", "dapo", "dr_grpo"] = "grpo",
    num_items_in_batch: float | Tensor | None = None,
    max_completion_length: int | None = None,
) -> Tensor:
    r"""Compute the loss of group relative policy optimisation (GRPO), GSPO, DAPO or Dr. GRPO.

    Example::

        out = lowtide.linear_log_probs(hidden, head.weight, target, logit_scale=1 / temperature)
        loss = grpo(out.log_prob, old, advantages, target != -100, epsilon_high=0.28)

    The loss of a token is

    .. math::
        r_{it} &= \frac{\pi(y_{it})}{\pi_\mathrm{old}(y_{it})}, \\
        d_{it} &= \log \frac{\pi_\mathrm{ref}(y_{it})}{\pi(y_{it})}, \\
        \ell_{it} &= -\min\bigl(r_{it} A_i,
                     \mathrm{clip}(r_{it}, 1 - \epsilon, 1 + \epsilon_\mathrm{high}) A_i\bigr) \\
                   &\qquad + \beta (e^{d_{it}} - d_{it} - 1).

    With ``importance_sampling_level="sequence"`` (GSPO) all tokens of a sequence share
    :math:`r_i = \exp \frac{1}{|y_i|} \sum_t \log r_{it}`.

    `loss_type` says how the tokens are reduced:

    * `"grpo"`: the mean over each sequence, then the mean over the B sequences (as in GSPO);
    * `"dapo"`: the sum divided by `num_items_in_batch`, or by the number of tokens that count here
      if that is None (TRL's `"bnpo"`);
    * `"dr_grpo"`: the sum divided by ``B * max_completion_length``.

    Shapes: policy, old, reference and mask [B, T], advantages [B]; the result is 0-d.

    Args:
        policy: log-probabilities of the sampled tokens (`log_prob` of
            :func:`lowtide.linear_log_probs`). policy, old and reference need the same `logit_scale`
            and `softcap`: for temperature T and a head with soft cap c, 1 / T and c / T.
        old: log-probabilities under the policy that sampled the tokens. None stands for policy's
            own values, for one step per sample. old takes no gradient.
        advantages: A, one number per sequence; takes no gradient.
        mask: nonzero where a token counts; elsewhere no value is used. A sequence without tokens
            that count adds 0.
        reference: log-probabilities under the reference model, for the KL term; None leaves this
            term out. reference takes no gradient.
        beta: weight of the KL term, 0.04 by default. A nonzero beta needs reference.
        epsilon, epsilon_high: the clip range; epsilon_high None means epsilon on both sides. GSPO
            uses 3e-4 and 4e-4.
        importance_sampling_level: `"token"` or `"sequence"`.
        loss_type: `"grpo"`, `"dapo"` or `"dr_grpo"`.
        num_items_in_batch: the normalizer that ranks and accumulation steps share; for `"dapo"`
            alone.
        max_completion_length: a number of tokens; required by `"dr_grpo"`, and for it alone.

    Precision: the result is float32, or float64 where an argument is float64. :math:`\log r` and d
    are clamped at 20: a ratio beyond 5e8 takes that value, and no gradient.

    Memory: O(B T), a few tensors of that shape.

    Errors: those of :mod:`lowtide.losses`.

    Source: arxiv.org/abs/2402.03300 (GRPO), 2507.18071 (GSPO), 2503.14476 (DAPO), 2503.20783 (Dr.
    GRPO); the KL estimate is k3 of joschu.net/blog/kl-approx.html
    """
    check_choice("importance_sampling_level", importance_sampling_level, ("token", "sequence"))
    if loss_type == "bnpo":  # type: ignore[comparison-overlap]
        raise ArgumentError("loss_type 'bnpo' is 'dapo' here, without num_items_in_batch; got 'bnpo'")
    if loss_type == "gspo":  # type: ignore[comparison-overlap]
        raise ArgumentError("loss_type 'gspo' is importance_sampling_level='sequence' here; got 'gspo'")
    check_choice("loss_type", loss_type, ("grpo", "dapo", "dr_grpo"))
    for name, value, user in (
        ("num_items_in_batch", num_items_in_batch, "dapo"),
        ("max_completion_length", max_completion_length, "dr_grpo"),
    ):
        if value is not None and loss_type != user:
            raise ArgumentError(
                f"{name} is for loss_type={user!r} alone, got it with {loss_type!r}; leave it out"
            )
    check_numbers(
        beta=beta, epsilon=epsilon, epsilon_high=epsilon_high, max_completion_length=max_completion_length
    )
    for name, value in (("epsilon", epsilon), ("epsilon_high", epsilon_high)):
        if value is not None and not value >= 0:
            raise ArgumentError(f"{name} must be a number of at least 0, got {value}")
    if beta and reference is None:
        raise ArgumentError(
            f"beta weighs the KL term, which needs reference, got beta={beta} without; "
            "pass reference, or leave beta out"
        )
    if loss_type == "dr_grpo" and not (max_completion_length and max_completion_length > 0):
        raise ArgumentError(
            "max_completion_length must be a number of tokens for loss_type='dr_grpo', "
            f"got {max_completion_length}"
        )
    policy_BT, old_BT = widened("BT", policy=policy, old=policy if old is None else old)
    if num_items_in_batch is not None:
        check_divisor("num_items_in_batch", num_items_in_batch, policy)
    check_shape("advantages", advantages, policy.shape[:1])
    every = "; where every token counts, pass torch.ones_like(policy, dtype=torch.bool)"
    check_shape("mask", mask, policy.shape, every if mask is None else "")
    mask_BT = mask.bool()
    count_B = mask_BT.sum(1).clamp(min=1)

    log_ratio_BT = (policy_BT - old_BT.detach()).masked_fill(~mask_BT, 0)
    if importance_sampling_level == "sequence":
        log_ratio_BT = (log_ratio_BT.sum(1) / count_B)[:, None].expand_as(log_ratio_BT)
    ratio_BT = log_ratio_BT.clamp(max=LARGEST_LOG_RATIO).exp()
    clipped_BT = ratio_BT.clamp(1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high))
    advantage_B1 = advantages.detach()[:, None]
    plain_BT, clipped_BT = ratio_BT * advantage_B1, clipped_BT * advantage_B1
    # Where the two are equal, take the ratio's gradient: clamp has none at its ends in torch 2.15.
    loss_BT = -torch.where(clipped_BT < plain_BT, clipped_BT, plain_BT)
    if reference is not None:
        _, reference_BT = widened("BT", policy=policy, reference=reference)
        d_BT = (reference_BT.detach() - policy_BT).masked_fill(~mask_BT, 0).clamp(max=LARGEST_LOG_RATIO)
        loss_BT = loss_BT + (0.04 if beta is None else beta) * (d_BT.expm1() - d_BT)

    loss_B = loss_BT.masked_fill(~mask_BT, 0).sum(1)
    if loss_type == "grpo":
        return (loss_B / count_B).mean()
    if loss_type == "dr_grpo":
        return loss_B.mean() / max_completion_length
    count = mask_BT.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    return loss_B.sum() / number_beside(loss_B, count)
