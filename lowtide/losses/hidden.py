"""Compute a z-loss or log-probabilities of sequences from hidden states, within a workspace."""

from typing import TYPE_CHECKING, Literal, TypedDict

from torch import Tensor

from lowtide.core.checks import check_choice, check_tensors
from lowtide.core.errors import ArgumentError
from lowtide.ops.linear_cross_entropy import linear_log_probs
from lowtide.ops.linear_cross_entropy.definition.head import Backend, normalized
from lowtide.ops.linear_cross_entropy.definition.validation import check_normalizer
from lowtide.ops.linear_cross_entropy.sharding import placed_as

if TYPE_CHECKING:
    from typing_extensions import Unpack


class HeadOptions(TypedDict, total=False):
    """Name the options of :func:`lowtide.linear_log_probs`, which explains them."""

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
    normalizer: float | Tensor | None = None,
    **options: "Unpack[HeadOptions]",
) -> Tensor:
    r"""Compute the mean of the logits' squared logsumexp, a penalty that stops logits drifting.

    Example::

        loss = policy_loss + 1e-4 * z_loss(hidden, model.lm_head.weight, tokens)

    With z_i the logits of row i and n the number of rows whose target is not `ignore_index`, or
    `normalizer`,

    .. math:: L = \frac{1}{n} \sum_i \mathrm{lse}(z_i)^2.

    ``linear_cross_entropy(..., z_loss=1e-4)`` adds the same term to its loss in the same pass. Use
    this function in a step that has another loss.

    Shapes: input [..., D], linear_weight [V, D], target [...]; the result is 0-d.

    Args:
        target: rows with `ignore_index` do not count; which class another row has does not matter.
            The result is 0 if no row counts.
        ignore_index: rows with this target do not count; None means -100.
        normalizer: n, as in :func:`lowtide.linear_cross_entropy`. If it is None, n counts
            this rank's rows, also under :func:`lowtide.shard_head`; pass
            :func:`lowtide.tokens_per_rank` for the mean over all ranks' rows. Of a DTensor, n
            counts all rows.
        options: those of :func:`lowtide.linear_log_probs`; workspace is in bytes.

    Precision: the loss is float32, or float64 for float64.

    Memory: O(workspace), never N V.

    Raises: as :func:`lowtide.linear_log_probs`.

    Source: arxiv.org/abs/2204.02311
    """
    check_tensors({"input": input})
    check_normalizer(normalizer, "mean", input)
    found = linear_log_probs(input, linear_weight, target, ignore_index=ignore_index, **options)
    total = found.logsumexp.square().sum()
    if normalizer is None:
        return total / _counted(input, target, ignore_index).sum().clamp(min=1)
    return normalized(total, normalizer)


def sequence_log_probs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    reduction: Literal["sum", "mean"] = "sum",
    ignore_index: int | None = -100,
    **options: "Unpack[HeadOptions]",
) -> Tensor:
    r"""Compute the log-probability of each sequence, the sum or the mean over its tokens.

    Example::

        chosen, rejected = sequence_log_probs(hidden[:, :-1], head.weight, tokens[:, 1:]).chunk(2)

    With :math:`n_b` the number of targets :math:`t_{bi}` of sequence b that are not `ignore_index`,
    `"sum"` and `"mean"` are

    .. math::
        \sum_i \log p_b(t_{bi}) \qquad \text{and} \qquad \frac{1}{n_b} \sum_i \log p_b(t_{bi}).

    Shapes: input [B, T, D], linear_weight [V, D], target [B, T]; the result is [B].

    Args:
        target: the token that each position predicts, so slice: ``hidden[:, :-1]`` and
            ``tokens[:, 1:]``.
        reduction: `"sum"` for DPO and KTO, `"mean"` for ORPO and SimPO.
        ignore_index: positions with this target (prompt, padding) do not count; None means -100. A
            sequence in which no position counts has log-probability 0, without gradient.
        options: those of :func:`lowtide.linear_log_probs`; workspace is in bytes. For a temperature
            T pass ``logit_scale=1 / T``, and with a soft cap c also ``softcap=c / T``.

    Precision: the result is float32, or float64 for float64.

    Memory: O(workspace), never B T V; three numbers a token are kept for backward. Under
    ``torch.no_grad()``, as for a reference model, nothing is kept.

    Raises:
        ValueError, TypeError: if input is not [B, T, D], for another reduction, and as
            :func:`lowtide.linear_log_probs`. Each is also a RuntimeError.
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
    return log_prob_B / _counted(input, target, ignore_index).sum(-1).clamp(min=1)


def _counted(input: Tensor, target: Tensor, ignore_index: int | None) -> Tensor:
    """Return True for each row whose target is not `ignore_index`, placed as the input is."""
    counted: Tensor = placed_as(input, target)
    return counted.long() != (-100 if ignore_index is None else ignore_index)
