"""Register the operators that a graph sees of lowtide.

    linear_cross_entropy            mean or sum: the loss and the pending gradients;
                                    none: the loss and each row's statistics
    linear_cross_entropy_backward   gradients, from the upstream gradient and each row's statistics
    linear_log_probs                log_prob, entropy, logsumexp, argmax, each row's statistics
    linear_log_probs_backward       gradients, from up to three upstream gradients and statistics

Each operator runs the engine in its options and chooses nothing. A backward from statistics runs
the engine that made them; the statistics name it (engines/saved_stats.py).

A pending gradient is two tensors: the sum of the products, or that sum rounded, and the factor
still to be applied, empty for 1. Only the wanted gradients are returned, in the order of Head's
tensors. The first operator also takes the head of a K-dimensional loss, for a mean or sum.

fake.py registers the shapes of the outputs, autograd.py the derivatives.

Shapes: N tokens, D_k features of term k, V classes, P positions.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.core.collectives import Group
from lowtide.core.matmul import on_device_of
from lowtide.core.operator import operator
from lowtide.core.pending_gradient import finish_eagerly
from lowtide.ops.linear_cross_entropy.definition.head import Head, Labels, Options
from lowtide.ops.linear_cross_entropy.engines.gradients import Gradients
from lowtide.ops.linear_cross_entropy.engines.loss_engine import LossEngine, make_rows
from lowtide.ops.linear_cross_entropy.engines.row_loss import mean_factor
from lowtide.ops.linear_cross_entropy.engines.saved_stats import (
    call_number,
    engine_of,
    read_stats,
    results_and_saved,
    with_number,
    without_number,
)
from lowtide.ops.linear_cross_entropy.operator.arguments import HEAD, LABELS, OPTIONS, parsed
from lowtide.ops.linear_cross_entropy.operator.own_call import compared, own_call, upstream_of
from lowtide.ops.linear_cross_entropy.operator.planner import make_plan, readable, rows_for
from lowtide.ops.linear_cross_entropy.operator.positions import PositionGradients, widened
from lowtide.ops.linear_cross_entropy.planning.call import Call, backend_of
from lowtide.ops.linear_cross_entropy.planning.plan import Plan
from lowtide.ops.linear_cross_entropy.ranks import equal_values
from lowtide.ops.linear_cross_entropy.ranks.agreement import agree

PlannedCall = tuple[Plan, Head, Labels]


def _operator(name: str, arguments: str) -> Any:
    return operator(name, f"({arguments}, {OPTIONS}) -> Tensor[]")


@_operator("linear_cross_entropy", f"{HEAD}, {LABELS}")
def linear_cross_entropy(*arguments: Any) -> list[Tensor]:
    call, labels = parsed(arguments)
    head, options = call.head, call.options
    if head.by_position and options.sharded:  # each position's plan is agreed on by all ranks
        return _of_positions(call, labels)
    if head.by_position:
        rehearsal = _of_positions_and_finish
        return _compiled_side_by_side(options, _of_positions, call, labels, rehearsal=rehearsal)
    planned = _planned(call, labels)
    return _by_row(planned) if options.reduction == "none" else _run(_loss_and_outputs, planned)


@_operator("linear_cross_entropy_backward", f"Tensor? grad_output, Tensor[] statistics, {HEAD}, {LABELS}")
def linear_cross_entropy_backward(
    grad_output: Tensor | None, statistics: Sequence[Tensor], *arguments: Any
) -> list[Tensor]:
    return _gradients_by_row(*parsed(arguments), statistics, [grad_output])


@_operator("linear_log_probs", f"{HEAD}, Tensor target")
def linear_log_probs(*arguments: Any) -> list[Tensor]:
    return _by_row(_planned(*parsed(arguments, log_probs=True)))


@_operator(
    "linear_log_probs_backward",
    "Tensor? grad_log_prob, Tensor? grad_entropy, Tensor? grad_logsumexp, "
    f"Tensor[] statistics, {HEAD}, Tensor target",
)
def linear_log_probs_backward(
    grad_log_prob: Tensor | None,
    grad_entropy: Tensor | None,
    grad_logsumexp: Tensor | None,
    statistics: Sequence[Tensor],
    *arguments: Any,
) -> list[Tensor]:
    grad_output = [grad_log_prob, grad_entropy, grad_logsumexp]
    return _gradients_by_row(*parsed(arguments, log_probs=True), statistics, grad_output)


def _by_row(planned: PlannedCall) -> list[Tensor]:
    return with_number(_run(results_by_row, planned), planned[0].agreement)


def _gradients_by_row(
    call: Call, labels: Labels, statistics: Sequence[Tensor], grad_output: list[Tensor | None]
) -> list[Tensor]:
    planned = _planned(call, labels, statistics=statistics, upstream=upstream_of(grad_output))
    return _run(gradients_by_row, planned, without_number(statistics, planned[0].agreement), grad_output)


# Compute a call whose plan is made. The results of rows are losses, or else log_prob, entropy,
# logsumexp and argmax.


def results_by_row(plan: Plan, head: Head, labels: Labels) -> list[Tensor]:
    """Return the results of rows, and each row's statistics for backward."""
    engine = _engine(plan, head, labels)
    return results_and_saved(engine.row_statistics(), engine.rows, plan.engine)


def gradients_by_row(
    plan: Plan, head: Head, labels: Labels, statistics: Sequence[Tensor], grad_output: Sequence[Tensor | None]
) -> list[Tensor]:
    """Return the wanted gradients, from the upstream gradients of the results of rows."""
    engine = _engine(plan, head, labels)
    rows = engine.rows
    stats = read_stats(statistics, rows, engine.stats_kind)
    given = [*grad_output]
    if plan.agreement is not None:  # ranks with tokens of their own may use other results
        for place, of_some_rank in enumerate(plan.agreement.upstream):
            if of_some_rank and given[place] is None:
                given[place] = stats.max_N.new_zeros(rows.N)
    if plan.call_kind.log_probs:
        coefs = rows.log_prob_coefs(stats, *given)
    else:
        (grad,) = given
        coefs = rows.coefs(stats.max_N.new_zeros(rows.N) if grad is None else grad.flatten())
    return engine.backward(coefs, stats).finished(engine.head.tensors, plan.backend)


def loss_and_gradients(
    plan: Plan, head: Head, labels: Labels, factor: Tensor | None = None
) -> tuple[Tensor, Gradients | None]:
    """Return the mean or sum of the rows' losses, and its gradients.

    With a factor, return the sum of the losses, and its gradients times the factor.
    """
    engine, denominator, gradients = _engine(plan, head, labels), None, None
    if factor is None and plan.options.reduction == "mean":
        denominator, factor = engine.rows.mean(labels.normalizer)
    elif factor is None:
        factor = engine.rows.one()
    if plan.needs_grad.some:
        stats, gradients = engine.forward(factor)
    else:
        stats = engine.row_statistics()
    return engine.rows.total_loss(stats, denominator), gradients


def _loss_and_outputs(plan: Plan, head: Head, labels: Labels) -> list[Tensor]:
    loss, gradients = loss_and_gradients(plan, head, labels)
    return [loss, *([] if gradients is None else gradients.outputs)]


# Plan a call, run it, choose the engine's class, add up positions.


def _run(compute: Callable[..., list[Tensor]], planned: PlannedCall, *arguments: Any) -> list[Tensor]:
    """Compute a planned call."""
    plan, head, _ = planned
    with on_device_of(head.inputs[0]):
        return _compiled_side_by_side(
            plan.options, compute, *planned, *arguments, rehearsal=functools.partial(_compute_both, compute)
        )


def _compiled_side_by_side(
    options: Options, function: Callable[..., list[Tensor]], *arguments: Any, rehearsal: Any = None
) -> list[Tensor]:
    """Return function(*arguments), whose kernels are compiled side by side where one has to be."""
    if backend_of(options.engine) != "triton":
        return function(*arguments)
    if options.sharded:  # to plan a backward pass, too, the rehearsal would speak to other ranks
        rehearsal = None
    from lowtide.core.compile_ahead.launches import compile_side_by_side

    return compile_side_by_side(function, *arguments, rehearsal=rehearsal)


def _compute_both(
    compute: Callable[..., list[Tensor]], plan: Plan, head: Head, labels: Labels, *arguments: Any
) -> None:
    """Compute the call, and its backward pass as far as it is known what that will be."""
    outputs, needs_grad = compute(plan, head, labels, *arguments), plan.needs_grad
    if compute is gradients_by_row or not needs_grad.some:
        return
    if compute is _loss_and_outputs:
        _finish(outputs, plan.call(head))
        return
    log_probs = plan.call_kind.log_probs
    statistics = outputs[4:] if log_probs else outputs[1:]
    planned = _planned(plan.call(head), labels, statistics=statistics)
    # Most losses have a gradient of log-probabilities alone.
    gradients_by_row(*planned, statistics, [outputs[0], *[None, None] * log_probs])


def _of_positions_and_finish(call: Call, labels: Labels) -> None:
    _finish(_of_positions(call, labels), call)


def _finish(outputs: Sequence[Tensor], call: Call) -> None:
    """Finish the gradients that a mean or sum has formed, as its backward pass does."""
    (loss, *gradients), backend = outputs, backend_of(call.options.engine)
    finish_eagerly(zip(gradients[::2], gradients[1::2], call.trained), loss, backend, in_place=True)


def _of_positions(call: Call, labels: Labels) -> list[Tensor]:
    """Compute a sum or mean over positions, and its gradients.

    Each position's gradients are formed while its logits are there, as three products.
    """
    head, calls = call.head, []
    wide = widened(head, call.needs_grad.all, call.options.sum_dtype)
    for part, part_labels in zip(wide.at_positions(), labels.at_positions()):
        calls.append(_planned(call._replace(head=part), part_labels))
    plan = calls[0][0]
    with on_device_of(head.inputs[0]):
        denominator, factor = _mean_of_positions(calls, labels)
        gradients = PositionGradients(head, plan.needs_grad, plan.sum_dtype)
        loss = torch.zeros((), dtype=plan.sum_dtype, device=head.device)
        for position, planned in enumerate(calls):
            of_one, found = loss_and_gradients(*planned, factor)
            loss += of_one
            if found is not None:
                gradients.add(position, found)
            del found  # free it before the next one is made
        return [loss if denominator is None else loss / denominator, *gradients.gradients.outputs]


def _mean_of_positions(calls: Sequence[PlannedCall], labels: Labels) -> tuple[Tensor | None, Tensor]:
    """Return the divisor of a mean over positions (None for a sum), and the gradients' factor."""
    plan, head, _ = calls[0]
    if plan.options.reduction == "sum":
        return None, torch.ones((), dtype=plan.sum_dtype, device=head.device)
    weights, ignored = [], []
    for rows in (make_rows(*call) for call in calls):  # one position's vectors at a time
        weights.append(rows.denominator())
        ignored.append(rows.ignored_N.all())
    denominator = torch.stack(weights).sum() if labels.normalizer is None else labels.normalizer
    return denominator, mean_factor(denominator, torch.stack(ignored).all())


def _planned(
    call: Call,
    labels: Labels,
    *,
    statistics: Sequence[Tensor] | None = None,
    upstream: dict[str, bool] | None = None,
) -> PlannedCall:
    """Return what an engine takes: its plan, and operands that it can read.

    `upstream` says which results have an upstream gradient, in the backward of a sharded head.
    """
    if statistics is not None:
        call = call._replace(options=call.options._replace(engine=engine_of(statistics)))
    call = readable(call)
    plan, head, options = make_plan(call), call.head, call.options
    if options.sharded:
        number = call_number(statistics) if statistics is not None and options.group else None
        own = own_call(plan, head, labels, functools.partial(rows_for, call), upstream, number)
        plan = plan.agreed(agree(own))
        head, labels, differ_k = compared(plan, head, labels)
        if differ_k is not None:
            equal_values.tell_hosts(Group(options.group), own.compared_on_device, differ_k)
    return plan, head, labels


def _engine(plan: Plan, *operands: Any) -> LossEngine:
    """Return the plan's engine; modules that import Triton are imported only here."""
    kind: type[LossEngine]
    if plan.exponentials and plan.agreement is not None:
        from lowtide.ops.linear_cross_entropy.engines.exponentials.sharded_engine import (
            ShardedExponentialsEngine as kind,
        )
    elif plan.exponentials:
        from lowtide.ops.linear_cross_entropy.engines.exponentials.engine import ExponentialsEngine as kind
    elif plan.soft_targets:
        from lowtide.ops.linear_cross_entropy.engines.soft_targets.engine import SoftTargetsEngine as kind
    elif plan.cpu_exponentials and plan.agreement is not None:
        from lowtide.ops.linear_cross_entropy.engines.cpu_exponentials.sharded_engine import (
            ShardedCpuExponentialsEngine as kind,
        )
    elif plan.cpu_exponentials:
        from lowtide.ops.linear_cross_entropy.engines.cpu_exponentials.engine import (
            CpuExponentialsEngine as kind,
        )
    elif plan.one_product_of_logits:
        from lowtide.ops.linear_cross_entropy.engines.logits.one_product import OneProductEngine as kind
    else:
        from lowtide.ops.linear_cross_entropy.engines.logits.engine import LogitsEngine as kind
    return kind(plan, *operands)
