"""From hidden states and a head to what the other losses are made of, within a workspace."""

from typing import TYPE_CHECKING, Literal, TypedDict

from torch import Tensor

from lowtide.core.checks import check_choice, check_tensors
from lowtide.core.errors import ArgumentError
from lowtide.ops.linear_cross_entropy import linear_log_probs
from lowtide.ops.linear_cross_entropy.definition.head import Backend

if TYPE_CHECKING:
    from typing_extensions import Unpack


class HeadOptions(TypedDict, total=False):
    """The options of :func:`lowtide.linear_log_probs`, which explains them."""

    linear_bias: Tensor | None
    softcap: float | None
    logit_scale: float | Tensor | None
    workspace: int | None
    backend: Backend


def z_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    ignore_index: int | None = -100,
    **options: "Unpack[HeadOptions]",
) -> Tensor:
    r"""Compute the mean of :math:`\mathrm{lse}(z_i)^2` over the rows that count: it keeps logits from
    drifting.

    Example::

        loss = policy_loss + 1e-4 * z_loss(hidden, model.lm_head.weight, tokens)

    The same number comes with the loss, in the same sweep, from ``linear_cross_entropy(..., z_loss=1e-4)``.
    Alone it is for a step whose own loss is another one.

    Shapes: input [..., D], linear_weight [V, D], target [...]; the result is 0-d.

    Args:
        target: only which rows have `ignore_index` matters. With none that counts the result is 0.
        ignore_index: None means -100.
        options: those of :func:`lowtide.linear_log_probs`.

    Memory: O(workspace), never N V.

    Source: arxiv.org/abs/2204.02311
    """
    found = linear_log_probs(input, linear_weight, target, ignore_index=ignore_index, **options)
    return found.logsumexp.square().sum() / _counted(target, ignore_index).sum().clamp(min=1)


def sequence_log_probs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    reduction: Literal["sum", "mean"] = "sum",
    ignore_index: int | None = -100,
    **options: "Unpack[HeadOptions]",
) -> Tensor:
    r"""Compute the log-probability of each sequence: the sum, or the mean, of its tokens'.

    Example::

        chosen, rejected = sequence_log_probs(hidden[:, :-1], head.weight, tokens[:, 1:]).chunk(2)

    Shapes: input [B, T, D], linear_weight [V, D], target [B, T]; the result is [B].

    Args:
        target: the token that each position predicts, so slice: ``hidden[:, :-1]`` and ``tokens[:, 1:]``.
        reduction: `"sum"` for DPO and KTO, `"mean"` for ORPO and SimPO.
        ignore_index: positions with this target (prompt, padding) do not count; a sequence in which none
            counts has 0, without gradient. None means -100.
        options: those of :func:`lowtide.linear_log_probs`. For a temperature T that is
            ``logit_scale=1 / T``, and with a soft cap c ``softcap=c / T`` beside it.

    Memory: O(workspace), never B T V; three numbers a token are kept for backward. Under ``torch.no_grad()``,
    as for a reference model, nothing is kept.
    """
    check_choice("reduction", reduction, ("sum", "mean"))
    check_tensors({"input": input})
    if input.dim() != 3:
        hint = (
            "flatten what comes before T"
            if input.dim() > 3
            else "for one sequence, input[None] and target[None]"
        )
        raise ArgumentError(f"input must have shape [B, T, D], got {list(input.shape)}; {hint}")
    found = linear_log_probs(input, linear_weight, target, ignore_index=ignore_index, **options)
    log_prob_B = found.log_prob.sum(-1)
    if reduction == "sum":
        return log_prob_B
    return log_prob_B / _counted(target, ignore_index).sum(-1).clamp(min=1)


def _counted(target: Tensor, ignore_index: int | None) -> Tensor:
    return target.long() != (-100 if ignore_index is None else ignore_index)
