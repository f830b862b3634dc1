"""Register the operators of distillation, the shapes of their outputs, and their FLOPs.

    distillation            computes the loss. For mean and sum it also computes the wanted
                            gradients. Each gradient is two tensors: the sum of the products, or
                            that sum rounded; and the factor still to be applied, empty for 1.
    distillation_backward   computes, for reduction "none", the wanted gradients from the upstream
                            gradient

If the heads are divided over ranks and the reduction is "none", the first operator also returns the
number of the call. The second operator takes this number, and the ranks compare it: all of them
have to run the backward of the same call.

autograd.py defines the derivatives. An operator chooses its chunk sizes when it runs, so a new
number of rows does not compile a graph again.

Shapes: N rows, D features, V classes.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.library import register_fake

from lowtide.core.flop_formula import register_flop_formula
from lowtide.core.matmul import on_device_of
from lowtide.core.operator import operator, schema_of
from lowtide.ops.distillation.engine import DistillationEngine
from lowtide.ops.distillation.heads import DistillationOptions, Heads
from lowtide.ops.distillation.planner import DistillationPlan, keeps_sum, make_plan, rows_for
from lowtide.ops.linear_cross_entropy.engines.gradients import unwritten
from lowtide.ops.linear_cross_entropy.engines.saved_stats import with_number
from lowtide.ops.linear_cross_entropy.ranks import equal_values
from lowtide.ops.linear_cross_entropy.ranks.agreement import OwnCall, agree

ARGUMENTS = f"{schema_of(Heads)}, bool[] needs_grad, {schema_of(DistillationOptions)}"


@operator("distillation", f"({ARGUMENTS}) -> Tensor[]")
def distillation(*arguments: Any) -> list[Tensor]:
    """Run the engine; return the loss, then for each wanted gradient a tensor and its factor."""
    heads, needs_grad, options = _parsed(arguments)
    plan = _planned(heads, needs_grad, options, "distillation")
    with on_device_of(heads.student_input):
        loss, gradients = DistillationEngine(plan, heads).run()
        if _returns_number(options):
            return with_number([loss], plan.agreement)
        return [loss, *gradients.outputs]


@operator("distillation_backward", f"(Tensor? grad_output, Tensor? number, {ARGUMENTS}) -> Tensor[]")
def distillation_backward(grad_output: Tensor | None, number: Tensor | None, *arguments: Any) -> list[Tensor]:
    """Run the engine on an upstream gradient; return the wanted gradients."""
    heads, needs_grad, options = _parsed(arguments)
    backward = {
        "upstream": {"loss": grad_output is not None},
        "number": None if number is None else int(number.item()),
    }
    plan = _planned(heads, needs_grad, options, "distillation_backward", **backward)
    if grad_output is None:
        grad_output = heads.student_input.new_zeros(heads.leading, dtype=options.sum_dtype)
    with on_device_of(heads.student_input):
        engine = DistillationEngine(plan, heads, grad_output)
        _, gradients = engine.run()
        return gradients.finished(heads.student, engine.plan.backend)


def _planned(
    heads: Heads, needs_grad: Sequence[bool], options: DistillationOptions, operator: str, **backward: Any
) -> DistillationPlan:
    """Return the plan of a call; the ranks of divided heads agree on the rows per chunk."""
    plan = make_plan(heads, options, needs_grad)
    if not options.group:
        return plan
    own = OwnCall(
        operator=operator,
        shard=options.shard,
        classes=heads.classes,
        tokens=heads.rows,
        device=heads.device,
        equal=_facts_of(heads, needs_grad, options),
        equal_tensors={} if options.tokens_sharded or options.ranks == 1 else {"ignored": heads.ignored},
        rows_for=functools.partial(rows_for, heads, options, needs_grad),
        **backward,
    )
    agreement, tensors = agree(own), equal_values.on_device(own.equal_tensors)
    differ = equal_values.differ(agreement.group, tensors) if tensors else None
    return replace(plan, rows=agreement.rows, agreement=agreement, differ=differ)


def _facts_of(heads: Heads, needs_grad: Sequence[bool], options: DistillationOptions) -> dict[str, Any]:
    """Return, by name, the facts that must be equal on all ranks, as JSON can hold them."""
    names = ("beta", "temperature", "reduction", "student_softcap", "teacher_softcap")
    facts: dict[str, Any] = {name: getattr(options, name) for name in names}
    facts["requires_grad of student_input, student_weight, student_bias"] = [*needs_grad]
    facts["arguments"] = [name for name, each in heads._asdict().items() if each is not None]
    for side in ("student", "teacher"):
        input = getattr(heads, f"{side}_input")
        facts[f"{side}_input's features"] = input.shape[-1]
        facts[f"{side}_input's dtype"] = str(input.dtype)
        facts[f"the dtype of the {side}'s products"] = str(getattr(options, f"{side}_dtype"))
    return facts


def _returns_number(options: DistillationOptions) -> bool:
    return bool(options.group) and options.reduction == "none"


def _parsed(arguments: Sequence[Any]) -> tuple[Heads, list[bool], DistillationOptions]:
    """Return the operator's arguments as heads, needs_grad and options."""
    count = len(Heads._fields)
    return Heads(*arguments[:count]), list(arguments[count]), DistillationOptions(*arguments[count + 1 :])


@register_fake("lowtide::distillation")
def _(*arguments: Any) -> list[Tensor]:
    heads, needs_grad, options = _parsed(arguments)
    of_loss = heads.leading if options.reduction == "none" else ()
    outputs = [heads.student_input.new_empty(of_loss, dtype=options.sum_dtype)]
    if _returns_number(options):
        return [*outputs, torch.empty(1, dtype=torch.long, device="cpu")]
    for place, (like, grad) in enumerate(zip(heads.student, needs_grad)):
        if grad and like is not None:
            summed = place == 2 or (place == 1 and keeps_sum(heads, options, needs_grad))
            shape = (heads.rows, like.shape[-1]) if place == 0 else like.shape
            outputs += unwritten(like, shape, sum_dtype=options.sum_dtype, summed=summed)
    return outputs


@register_fake("lowtide::distillation_backward")
def _(grad_output: Tensor | None, number: Tensor | None, *arguments: Any) -> list[Tensor]:
    heads, needs_grad, _ = _parsed(arguments)
    pairs = zip(heads.student, needs_grad)
    return [like.new_empty(like.shape) for like, grad in pairs if grad and like is not None]


def _flops(first: int, *arguments: Any, **_out: Any) -> int:
    """Return the FLOPs of a call, whose heads begin at `first`; shapes stand for tensors."""
    heads, needs_grad, _ = _parsed(arguments[first:])
    (*leading, D), (V, teacher_D) = heads.student_input, heads.teacher_weight
    return 2 * math.prod(leading) * V * (D * (1 + needs_grad[0] + needs_grad[1]) + teacher_D)


register_flop_formula(torch.ops.lowtide.distillation)(functools.partial(_flops, 0))
register_flop_formula(torch.ops.lowtide.distillation_backward)(functools.partial(_flops, 2))
