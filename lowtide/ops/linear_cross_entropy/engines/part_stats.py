"""Gather the row statistics of the parts of all classes, and merge them.

A chunk's statistics move as one tensor: a maximum, a sum and the target's logit for each row, and
what the options add. Merging is the same for ranks and for segments, since each is a part.

Shapes: C tokens of a chunk; P parts of the classes of all ranks, p of them on this one.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lowtide.ops.linear_cross_entropy.engines.formulas.row_math import SoftmaxStats

if TYPE_CHECKING:
    from lowtide.ops.linear_cross_entropy.ranks.agreement import Agreement

# An integer travels as a number of as many bits.
INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


def gather_parts(mine_p: Tensor, agreement: "Agreement") -> Callable[[], Tensor]:
    """Begin to gather [p, ...] of each rank; return a function that waits and returns [P, ...].

    The gathered parts are in the order of their classes. Each rank sends as many parts as the rank
    that has most.
    """
    wait = agreement.group.gather(mine_p)

    def parts() -> Tensor:
        all_P = wait().flatten(0, 1)
        return all_P if agreement.order_P is None else all_P.index_select(0, agreement.order_P)

    return parts


def begin_merge(
    out: SoftmaxStats,
    target_logit_C: Tensor,
    own: Sequence[tuple[slice, int]],
    take_stats: Callable[[slice, SoftmaxStats], None],
    agreement: "Agreement",
    weight_P: Tensor | None,
) -> Callable[[], None]:
    """Take the statistics of this rank's parts and begin to gather them from all ranks.

    Return a function that merges all parts into `out`.

    `own` lists the parts of this rank's classes, each with the number of its first class among all
    classes. `take_stats` computes the statistics of one part. `target_logit_C` is 0 in rows whose
    target belongs to another rank.
    """
    wanted = [each.name for each in fields(out) if getattr(out, each.name) is not None]
    # The target's logit takes the place of its distance from the log-sum-exp.
    names = [name for name in wanted if name not in ("argmax_N", "grad_dot_logit_N")]
    sums = [name for name in names if name != "nll_N"]
    C, integers = out.max_N.shape[0], INTEGERS[out.max_N.dtype]
    argmax = out.argmax_N is not None
    sent_pkC = out.max_N.new_zeros(agreement.most_parts, len(names) + argmax, C)
    sent_pkC[:, names.index("max_N")].fill_(-torch.inf)
    if "nll_N" in names:
        sent_pkC[0, names.index("nll_N")] = target_logit_C
    for (classes, first_class), sent_kC in zip(own, sent_pkC):
        if classes.stop == classes.start:
            continue
        part = SoftmaxStats(**{name: sent_kC[names.index(name)] for name in sums})
        if argmax:
            part = replace(part, argmax_N=torch.empty_like(out.argmax_N))
        take_stats(classes, part)
        if argmax:
            sent_kC[-1] = (part.argmax_N + first_class).to(integers).view(sent_kC.dtype)
    parts = gather_parts(sent_pkC, agreement)

    def merge() -> None:
        found_kPC = parts().unbind(1)
        found = SoftmaxStats(**dict(zip(names, found_kPC)))
        if argmax:
            found = replace(found, argmax_N=found_kPC[-1].contiguous().view(integers).long())
        merge_stats(out, found, weight_P)

    return merge


def merge_stats(
    out: SoftmaxStats,
    parts: SoftmaxStats,  # [P, C] each; in place of nll the target's logit, 0 in parts without it
    weight_P: Tensor | None,  # the total class weight of each part, for smooth_nll_N
) -> None:
    """Write to `out` the statistics of all classes, from those of the parts.

    With m the largest maximum m_p, each sum counts exp(m_p - m) times, and lse_p = log s_p + m_p:

        sum         = sum_p s_p exp(m_p - m)
        mean        = sum_p s_p exp(m_p - m) (mean_p + m_p - m) / sum
        smooth_nll  = sum_p smooth_nll_p + weight_p (lse - lse_p)
        soft_nll    = sum_p soft_nll_p + soft_mass_p (lse - lse_p)
    """
    max_C = parts.max_N.amax(0)
    # A part without classes, or whose classes are all excluded by a bias of -inf.
    absent_PC = (parts.max_N == -torch.inf) | (parts.sum_N == 0)
    shift_PC = (parts.max_N - max_C).masked_fill_(absent_PC, 0)
    sum_PC = (parts.sum_N * shift_PC.exp()).masked_fill_(absent_PC, 0)
    out.max_N.copy_(max_C)
    torch.sum(sum_PC, 0, out=out.sum_N)
    log_sum_C = out.sum_N.log()
    if out.nll_N is not None:
        torch.sub(log_sum_C, parts.nll_N.sum(0) - max_C, out=out.nll_N)
    # lse - lse_p, from differences alone: the two may be large and close
    above_PC = (log_sum_C - parts.sum_N.log() - shift_PC).masked_fill_(absent_PC, torch.inf)

    def sum_of_nll(nll_PC: Tensor, mass_PC: Tensor) -> Tensor:
        rest_PC = (mass_PC * above_PC).masked_fill_(mass_PC == 0, 0)
        return (nll_PC.masked_fill(absent_PC, 0) + rest_PC).sum(0)

    if out.smooth_nll_N is not None and weight_P is not None:
        out.smooth_nll_N.copy_(sum_of_nll(parts.smooth_nll_N, weight_P[:, None].expand_as(shift_PC)))
    if out.soft_nll_N is not None:
        torch.sum(parts.soft_mass_N, 0, out=out.soft_mass_N)
        out.soft_nll_N.copy_(sum_of_nll(parts.soft_nll_N, parts.soft_mass_N))
    if out.mean_N is not None:
        mean_PC = (sum_PC * (parts.mean_N + shift_PC)).masked_fill_(absent_PC, 0)
        torch.div(mean_PC.sum(0), out.sum_N, out=out.mean_N)
    if out.argmax_N is not None:
        # Of several largest logits, take the first class. NaN counts as the largest, as in torch.
        largest_PC = (parts.max_N == max_C) | parts.max_N.isnan()
        none = torch.iinfo(torch.long).max
        out.argmax_N.copy_(parts.argmax_N.masked_fill(~largest_PC, none).amin(0))
