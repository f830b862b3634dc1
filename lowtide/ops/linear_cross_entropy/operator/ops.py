"""The registered operators: what a graph sees of lowtide. fake.py says what comes out of them, without
running them; autograd.py registers their derivatives.

    linear_cross_entropy            the loss of a mean or sum, and the gradients that wait for its upstream
                                    gradient; of none, the loss and the statistics of each row
    linear_cross_entropy_backward   gradients, from the upstream gradient and the statistics of each row
    linear_log_probs                log_prob, entropy, logsumexp, argmax, and the statistics of each row
    linear_log_probs_backward       gradients, from up to three upstream gradients and these statistics

All obey the engine among their options, but for a backward from statistics: these say which engine they are
from (`with_engine`), and that one runs. It chooses nothing.

A gradient that waits comes as two tensors: the sum of the products, or that sum rounded, and the factor still
to be applied. Gradients come in the order of Head's tensors, only those that are wanted.

The first takes the head of a K-dimensional loss, too, for a mean or sum.

Shapes: N tokens, D_k features of term k, V classes, P positions.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.core.matmul import on_device_of
from lowtide.core.operator import operator
from lowtide.ops.linear_cross_entropy.definition.head import Head, Labels, Options
from lowtide.ops.linear_cross_entropy.engines.engine import Stream
from lowtide.ops.linear_cross_entropy.engines.gradients import Gradients
from lowtide.ops.linear_cross_entropy.engines.logits.softmax_torch import Statistics
from lowtide.ops.linear_cross_entropy.engines.row_loss import LossRows
from lowtide.ops.linear_cross_entropy.operator.positions import PositionGradients, widened
from lowtide.ops.linear_cross_entropy.planning.call import ENGINES, Job, Wanted
from lowtide.ops.linear_cross_entropy.planning.operands import readable
from lowtide.ops.linear_cross_entropy.planning.plan import Plan
from lowtide.ops.linear_cross_entropy.planning.planner import make_plan
from lowtide.ops.linear_cross_entropy.planning.requirements import check_engine

HEAD = "Tensor[] inputs, Tensor[] weights, Tensor? bias, Tensor? scale"
LABELS = ", ".join(f"Tensor{'?' * (name in Labels._field_defaults)} {name}" for name in Labels._fields)
OPTIONS = (
    "bool[] wanted, str reduction, int ignore_index, float label_smoothing, float z_loss, float softcap, "
    "bool few_tokens, str engine, int? dense, ScalarType compute_dtype, int? workspace, str backend"
)


def _operator(name: str, arguments: str) -> Any:
    return operator(name, f"({arguments}, {OPTIONS}) -> Tensor[]")


@_operator("linear_cross_entropy", f"{HEAD}, {LABELS}")
def linear_cross_entropy(*arguments: Any) -> list[Tensor]:
    parts = parsed(arguments)
    head = parts[0]
    if head.by_position:
        return _of_positions(*parts)
    call = _call(*parts)
    with on_device_of(head.inputs[0]):
        stream = _stream(*call)
        if stream.plan.options.reduction == "none":
            statistics = stream.take_statistics()
            return [stream.of_all(stream.loss_N(statistics)), *_kept_statistics(stream, statistics)]
        denominator, factor = _denominator([stream])
        loss, gradients = _sum(stream, factor)
        return [
            loss if denominator is None else loss / denominator,
            *([] if gradients is None else _waiting(gradients)),
        ]


@_operator("linear_cross_entropy_backward", f"Tensor upstream, Tensor[] statistics, {HEAD}, {LABELS}")
def linear_cross_entropy_backward(
    upstream: Tensor, statistics: Sequence[Tensor], *arguments: Any
) -> list[Tensor]:
    call = _call(*parsed(arguments), statistics=statistics)
    with on_device_of(call[1].inputs[0]):
        stream = _stream(*call)
        terms = stream.terms(upstream.flatten())
        return _final(stream, terms, _read_statistics(stream, statistics))


@_operator("linear_log_probs", f"{HEAD}, Tensor target")
def linear_log_probs(*arguments: Any) -> list[Tensor]:
    call = _call(*parsed(arguments, log_probs=True), log_probs=True)
    with on_device_of(call[1].inputs[0]):
        stream = _stream(*call)
        statistics = stream.take_statistics()
        log_prob_N = statistics.gap_N.neg().masked_fill_(stream.foreign_N, torch.nan)
        results = (log_prob_N, stream.entropy_N(statistics), stream.logsumexp_N(statistics))
        return [
            *(stream.of_all(each) for each in results),
            stream.of_all(statistics.argmax_N, ignored=-1),
            *_kept_statistics(stream, statistics),
        ]


@_operator(
    "linear_log_probs_backward",
    "Tensor? log_prob_upstream, Tensor? entropy_upstream, Tensor? logsumexp_upstream, "
    f"Tensor[] statistics, {HEAD}, Tensor target",
)
def linear_log_probs_backward(
    log_prob_upstream: Tensor | None,
    entropy_upstream: Tensor | None,
    logsumexp_upstream: Tensor | None,
    statistics: Sequence[Tensor],
    *arguments: Any,
) -> list[Tensor]:
    call = _call(*parsed(arguments, log_probs=True), log_probs=True, statistics=statistics)
    with on_device_of(call[1].inputs[0]):
        stream = _stream(*call)
        known = _read_statistics(stream, statistics)
        upstream = (log_prob_upstream, entropy_upstream, logsumexp_upstream)
        terms = stream.log_prob_terms(known, *upstream)
        return _final(stream, terms, known)


# Pieces.


def parsed(
    arguments: Sequence[Any], *, log_probs: bool = False
) -> tuple[Head, Labels, tuple[bool, ...], Options]:
    """Return what an operator's arguments stand for, from the head on."""
    inputs, weights, bias, scale, *rest = arguments
    head, count = Head(tuple(inputs), tuple(weights), bias, scale), 1 if log_probs else len(Labels._fields)
    return head, Labels(*rest[:count]), tuple(rest[count]), Options(*rest[count + 1 :])


def _of_positions(head: Head, labels: Labels, wanted: tuple[bool, ...], options: Options) -> list[Tensor]:
    """A sum or mean. Each position's gradients are formed while its logits are there, and do not wait for the
    others': three products, as of a single head."""
    wide, calls = widened(head, wanted, options.sum_dtype), []
    for part, part_labels in zip(wide.at_positions(), labels.at_positions()):
        calls.append(_call(part, part_labels, wanted, options))
    plan = calls[0][0]
    with on_device_of(head.inputs[0]):
        denominator, factor = _denominator(LossRows(*call) for call in calls)
        gradients = PositionGradients(head, plan.wanted, plan.sum_dtype)
        loss = torch.zeros((), dtype=plan.sum_dtype, device=head.device)
        for position, call in enumerate(calls):
            of_one, found = _sum(_stream(*call), factor)
            loss += of_one
            if found is not None:
                gradients.add(position, found)
            del found  # before the next are made
        waiting = _waiting(gradients.gradients)
        return [loss if denominator is None else loss / denominator, *waiting]


def _denominator(calls: Iterable[LossRows]) -> tuple[Tensor | None, Tensor]:
    """Of the mean over all of them, None for a sum; and the factor of their gradients."""
    weights, ignored = [], []
    for rows in calls:  # vectors of one at a time
        if rows.plan.options.reduction == "sum":
            return None, torch.ones((), dtype=rows.plan.sum_dtype, device=rows.device)
        weights.append(rows.denominator())
        ignored.append(rows.ignored_N.all())
    denominator = torch.stack(weights).sum()
    # With every row ignored the loss is NaN and the gradients are zero, as in torch.
    return denominator, 1 / denominator.masked_fill(torch.stack(ignored).all(), 1)


def _sum(stream: Stream, factor: Tensor) -> tuple[Tensor, Gradients | None]:
    """The loss of all rows, and the gradients that are wanted, times factor."""
    gradients = None
    if stream.plan.wanted.some:
        statistics, gradients = stream.take_statistics_and_gradients(factor)
    else:
        statistics = stream.take_statistics()
    return stream.loss_N(statistics).masked_fill_(stream.ignored_N, 0).sum(), gradients


Call = tuple[Plan, Head, Labels]


def _call(
    head: Head,
    labels: Labels,
    wanted: tuple[bool, ...],
    options: Options,
    *,
    log_probs: bool = False,
    statistics: Sequence[Tensor] | None = None,
) -> Call:
    """What an engine takes: its plan, and operands that it can read."""
    if statistics is not None:
        options = options._replace(engine=engine_of(statistics))
    check_engine(options, head.device)
    head = readable(head, options)
    job = job_of(head, labels.target, labels.class_weight, wanted, log_probs=log_probs)
    return make_plan(head, options, job), head, labels


def job_of(
    head: Head, target: Tensor, class_weight: Tensor | None, wanted: Sequence[bool], *, log_probs: bool
) -> Job:
    terms = len(head.inputs)
    gradients = Wanted(tuple(wanted[:terms]), tuple(wanted[terms : 2 * terms]), *wanted[2 * terms :])
    soft_dtype = target.dtype if target.is_floating_point() else None
    return Job(gradients, log_probs, soft_dtype, class_weight is not None)


def _stream(plan: Plan, *operands: Any) -> Stream:
    if plan.exponentials:
        from lowtide.ops.linear_cross_entropy.engines.exponentials.engine import (
            ExponentialStream,  # imports Triton
        )

        return ExponentialStream(plan, *operands)
    if plan.distances:
        from lowtide.ops.linear_cross_entropy.engines.soft_targets.engine import (
            ProbabilityStream,  # imports Triton
        )

        return ProbabilityStream(plan, *operands)
    if plan.cpu_exponentials:
        from lowtide.ops.linear_cross_entropy.engines.exponentials.cpu_engine import CpuExponentialStream

        return CpuExponentialStream(plan, *operands)
    return Stream(plan, *operands)


def with_engine(vector_N: Tensor, engine: str) -> Tensor:  # [1, ..., 1, N]
    """Record in a vector which engine made it, for whoever reads it: leading dimensions of 1, as many as the
    engine's place among ENGINES. They go wherever the vector goes. An argument or an attribute would not:
    a checkpoint computes anew what backward reads, and the copy of a saved tensor has other strides."""
    return vector_N.view(*(1,) * ENGINES.index(engine), -1)


def engine_of(statistics: Sequence[Tensor]) -> str:
    return ENGINES[statistics[0].dim() - 1]


def _kept_statistics(stream: Stream, statistics: Statistics) -> list[Tensor]:
    """What backward needs of each row. An ignored one has an infinite maximum: whatever its logits are, their
    exponentials are 0."""
    max_N = with_engine(stream.of_all(statistics.max_N, ignored=torch.inf), stream.plan.engine)
    kept = [max_N, stream.of_all(statistics.sum_N, ignored=1)]
    third = statistics.mean_N if stream.plan.job.log_probs else statistics.mass_N
    return kept if third is None else [*kept, stream.of_all(third)]


def _read_statistics(stream: Stream, statistics: Sequence[Tensor]) -> Statistics:
    # Kernels read vectors whose numbers lie side by side; hooks may bring these back otherwise.
    max_N, sum_N, *third = (stream.of_counted(each.flatten().contiguous()) for each in statistics)
    if stream.plan.job.log_probs:
        return Statistics(max_N, sum_N, mean_N=third[0])
    return Statistics(max_N, sum_N, mass_N=third[0] if third else None)


def _waiting(gradients: Gradients) -> list[Tensor]:
    return [output for gradient in gradients.all if gradient is not None for output in gradient.outputs]


def _final(stream: Stream, terms: Any, statistics: Statistics) -> list[Tensor]:
    one = torch.ones((), dtype=stream.plan.sum_dtype, device=stream.device)
    gradients = stream.gradients(terms, statistics, one, final=True, take_statistics=False)
    tensors = zip(stream.head.tensors, gradients.all)
    return [
        gradient.finished(like, stream.plan.backend)
        for like, gradient in tensors
        if like is not None and gradient is not None
    ]
