"""Gather row statistics that exclude the target, of the classes of several ranks, and merge them.

Rank p has a reference r_p near the largest logit of its classes, and the sum S_p of exp(z - r_p)
over them without the target. One rank has the target, and so its logit z_t. A chunk's statistics
move as one tensor: these three numbers of each row, and further ones that options need. Then with r
the largest of z_t and all r_p

    S = sum_p S_p exp(r_p - r),   e = exp(z_t - r),   loss = log(1 + S) if r = z_t

z_t is saved with the merged statistics, so that backward gathers nothing.

The exponentials that a rank has stored are relative to r_p, so its coefficient c of a row has a
further factor exp(r_p - r).

Shapes: N tokens; C tokens of a chunk; P ranks; K numbers of a row that ranks exchange.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowtide.ops.linear_cross_entropy.engines.formulas.row_math import (
    ExcludedTargetStats,
    RowCoefs,
    target_nll,
)
from lowtide.ops.linear_cross_entropy.engines.part_stats import INTEGERS, gather_parts

if TYPE_CHECKING:
    from lowtide.ops.linear_cross_entropy.ranks.agreement import Agreement


def own_places(coefs: RowCoefs, first_class: int, classes: int) -> RowCoefs:
    """Return the coefficients with each target as a place among this rank's classes, or -1."""
    place_N = coefs.target_N - first_class
    return replace(coefs, target_N=place_N.masked_fill_((place_N < 0) | (place_N >= classes), -1))


def first_references(logit_C: Tensor, sampled_C: Tensor, row: RowCoefs) -> Tensor:
    """Return each row's first reference: the target's logit, or a large one if another rank has it.

    That is the largest logit of a few sampled classes. In such rows `logit_C` becomes -inf, in
    place. `row` comes from `own_places`.
    """
    elsewhere_C = row.target_N < 0
    logit_C.masked_fill_(elsewhere_C, -torch.inf)
    return torch.where(elsewhere_C, sampled_C, logit_C).masked_fill_(row.ignored_N, torch.inf)


def no_classes(like: ExcludedTargetStats) -> ExcludedTargetStats:
    """Return the statistics of a rank without classes."""
    part = like.each(torch.zeros_like)
    return replace(part, max_N=torch.full_like(like.max_N, -torch.inf))


def begin_merge(
    formulas: Any,
    out: ExcludedTargetStats,
    part: ExcludedTargetStats,
    logit_C: Tensor,
    row: RowCoefs,
    agreement: "Agreement",
    *,
    first_class: int,
    smooth_logit_C: Tensor | None = None,
    total_weight: Tensor | int = 0,
) -> Callable[[], Tensor]:
    """Begin to gather this rank's statistics; return a function that merges those of all ranks.

    The function writes to `out`, and returns exp(r_p - r), [C]. `row` comes from `own_places`.
    `logit_C` has the targets' logits; only rows whose target is on this rank are read.
    `smooth_logit_C` is sum_v w_v z_v of this rank's classes. `formulas` is the module that has
    `pack` and `merge`: this one or excluded_part_stats_triton.py.
    """
    own_KC = formulas.pack(part, logit_C, row, first_class, smooth_logit_C)
    gathered = gather_parts(own_KC[None], agreement)
    return lambda: formulas.merge(out, gathered(), own_KC, row, total_weight)


def pack(
    part: ExcludedTargetStats, logit_C: Tensor, row: RowCoefs, first_class: int, smooth_logit_C: Tensor | None
) -> Tensor:  # [K, C]
    """Return the numbers of each row that this rank sends."""
    own_C = row.target_N >= 0
    # If all of a rank's exponentials are 0, ignore its reference. But keep an infinite one: it
    # means that some logit is infinite, so that the loss is NaN.
    absent_C = (part.max_N == -torch.inf) | row.ignored_N
    if part.mean_N is None:
        absent_C |= (part.sum_N == 0) & (part.max_N < torch.inf)
    sent = [
        part.max_N.masked_fill(absent_C, -torch.inf),
        part.sum_N.masked_fill(absent_C, 0),
        logit_C.masked_fill(~own_C, 0),
    ]
    if smooth_logit_C is not None:
        sent.append(smooth_logit_C)
    if part.mean_N is not None:
        exp_C = torch.where(own_C, (logit_C - part.max_N).exp(), 0)
        of_target_C = (exp_C * (logit_C - part.max_N)).masked_fill_(exp_C == 0, 0)
        sent.append((part.mean_N * (part.sum_N + exp_C) - of_target_C).masked_fill_(absent_C, 0))
        number_C = (part.argmax_N + first_class).to(INTEGERS[part.max_N.dtype])
        sent.append(number_C.view(part.max_N.dtype))
    return torch.stack(sent)


def merge(
    out: ExcludedTargetStats, parts_PKC: Tensor, own_KC: Tensor, row: RowCoefs, total_weight: Tensor | int
) -> Tensor:  # [C]
    """Write the statistics of all classes to `out`, and return exp(r_p - r) of this rank."""
    reference_PC, sum_PC, logit_PC, *more = parts_PKC.unbind(1)
    merged_logit_C, largest_C = logit_PC.sum(0), reference_PC.amax(0)
    reference_C = torch.maximum(merged_logit_C, largest_C)
    none_PC, shift_PC = reference_PC == -torch.inf, reference_PC - reference_C
    factor_PC = shift_PC.exp().masked_fill_(none_PC, 0)
    sum_C = (factor_PC * sum_PC).sum(0)
    above_C = merged_logit_C - reference_C
    exp_C = above_C.exp()
    total_C = exp_C + sum_C
    out.max_N.copy_(reference_C.masked_fill(row.ignored_N, torch.inf))
    out.sum_N.copy_(sum_C)
    out.target_logit_N.copy_(merged_logit_C)
    target_nll(above_C, sum_C, total_C, out=out.nll_N)
    if out.smooth_nll_N is not None:
        lse_C = reference_C + total_C.log()
        torch.sub(lse_C * total_weight, more[0].sum(0), out=out.smooth_nll_N)
    if out.mean_N is not None:
        mean_PC, number_PC = more[-2:]
        of_target_C = (exp_C * above_C).masked_fill_(exp_C == 0, 0)
        moved_PC = (mean_PC + sum_PC * shift_PC).masked_fill_(none_PC, 0)
        torch.div((factor_PC * moved_PC).sum(0) + of_target_C, total_C, out=out.mean_N)
        argmax_PC = number_PC.contiguous().view(INTEGERS[out.max_N.dtype]).long()
        # Of several largest logits, take the first class. NaN counts as the largest, as in torch.
        first_PC = (reference_PC == largest_C) | reference_PC.isnan()
        most = torch.iinfo(torch.long).max
        out.argmax_N.copy_(argmax_PC.masked_fill_(~first_PC, most).amin(0))
    own_reference_C = own_KC[0]
    return (own_reference_C - reference_C).exp().masked_fill_(own_reference_C == -torch.inf, 0)
