"""Save row statistics as an operator's outputs, and read them in backward.

Backward must run the engine that made the statistics, because those of "exponentials" and
"cpu_exponentials" have another meaning than those of the other engines. The number of dimensions of
the first tensor tells the engine. Nothing else can. An argument of the operator or an attribute of
the graph may be wrong, because a checkpoint computes the statistics again, perhaps with another
engine. Strides may be lost, because a copy of a saved tensor may have others.

The statistics of a group's call end with the number of the call. In backward the ranks compare
these numbers, to be sure that all of them compute gradients of the same call.

Shapes: N tokens, of which M are kept.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lowtide.ops.linear_cross_entropy.definition.head import Options
from lowtide.ops.linear_cross_entropy.engines.formulas.row_math import ExcludedTargetStats, RowStats
from lowtide.ops.linear_cross_entropy.engines.row_loss import RowLoss, Stats
from lowtide.ops.linear_cross_entropy.planning.call import ENGINES, EXCLUDING

if TYPE_CHECKING:
    from lowtide.ops.linear_cross_entropy.ranks.agreement import Agreement


def with_engine(vector_N: Tensor, engine: str) -> Tensor:  # [1, ..., 1, N]
    """Return the vector with as many leading dimensions of 1 as the engine's place in ENGINES."""
    return vector_N.view(*(1,) * ENGINES.index(engine), -1)


def engine_of(saved: Sequence[Tensor]) -> str:
    """Return the engine that made these statistics."""
    return ENGINES[saved[0].dim() - 1]


def results_and_saved(stats: RowStats, rows: RowLoss, engine: str) -> list[Tensor]:
    """Return the results of all rows, and then the statistics that backward needs."""
    results, (max_N, *kept) = rows.results(stats)
    if saves_target_logit(rows.plan.options):
        assert isinstance(stats, ExcludedTargetStats)
        kept.append(rows.of_all(stats.target_logit_N))
    return [*results, with_engine(max_N, engine), *kept]


def saves_target_logit(options: Options) -> bool:
    """Return True if the targets' logits are saved: no rank can compute all of them in backward."""
    return bool(options.group) and options.engine in EXCLUDING


def with_number(outputs: list[Tensor], agreement: "Agreement | None") -> list[Tensor]:
    """Return outputs that end with statistics, and with the number of the group's call."""
    if agreement is None or not agreement.group.name:
        return outputs
    return [*outputs, torch.tensor([agreement.number], device="cpu")]


def without_number(saved: Sequence[Tensor], agreement: "Agreement | None") -> Sequence[Tensor]:
    """Return the statistics alone."""
    return saved if agreement is None or not agreement.group.name else saved[:-1]


def call_number(saved: Sequence[Tensor]) -> int:
    """Return the number of the group's call that saved these statistics."""
    return int(saved[-1].item())


def read_stats(saved: Sequence[Tensor], rows: RowLoss, kind: type[Stats]) -> Stats:
    """Return the statistics of kept rows, read from what `results_and_saved` returned."""
    further = {}
    if saves_target_logit(rows.plan.options):
        *saved, logit_N = saved
        further["target_logit_N"] = rows.of_kept(logit_N.flatten().contiguous())
    # Kernels read contiguous vectors, and saved-tensor hooks may return others.
    fills = (torch.inf, 1, 0)  # the statistics of an ignored row
    max_N, sum_N, *third = (
        rows.of_kept(each.flatten().contiguous(), fill) for each, fill in zip(saved, fills)
    )
    if rows.plan.call_kind.log_probs:
        return kind(max_N, sum_N, mean_N=third[0], **further)
    return kind(max_N, sum_N, soft_mass_N=third[0] if third else None, **further)
