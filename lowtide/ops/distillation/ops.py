"""Register the operators that a graph sees of distillation, their outputs' shapes and their FLOPs.

    distillation            the loss. For mean and sum also the wanted gradients, each as two
                            tensors: the sum of the products, or that sum rounded; and the factor
                            still to be applied, empty for 1.
    distillation_backward   for reduction "none": the wanted gradients, from the upstream
                            gradient

They have no derivatives of their own; autograd.py has these. An operator chooses its chunk sizes
inside, so a new number of rows does not compile a graph again.

Shapes: N rows, D features, V classes.
"""

import math
from collections.abc import Sequence
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch.library import register_fake

from lowtide.core.flop_formula import register_flop_formula
from lowtide.core.matmul import on_device_of
from lowtide.core.operator import operator
from lowtide.ops.distillation.engine import DistillationEngine
from lowtide.ops.distillation.heads import DistillationOptions, Heads
from lowtide.ops.distillation.planner import keeps_sum, make_plan
from lowtide.ops.linear_cross_entropy.engines.gradients import factor_remains

TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    torch.dtype: "ScalarType",
    str: "str",
    float: "float",
    float | None: "float?",
    int | None: "int?",
}


def _schema(fields: type) -> str:
    """Return the schema of a named tuple's fields."""
    return ", ".join(f"{TYPES[kind]} {name}" for name, kind in get_type_hints(fields).items())


ARGUMENTS = f"{_schema(Heads)}, bool[] needs_grad, {_schema(DistillationOptions)}"


@operator("distillation", f"({ARGUMENTS}) -> Tensor[]")
def distillation(*arguments: Any) -> list[Tensor]:
    """Run the engine; return the loss, then a gradient and a factor for each one that is wanted."""
    heads, needs_grad, options = _parsed(arguments)
    with on_device_of(heads.student_input):
        loss, gradients = DistillationEngine(make_plan(heads, options, needs_grad), heads).run()
        return [loss, *gradients.outputs]


@operator("distillation_backward", f"(Tensor grad_output, {ARGUMENTS}) -> Tensor[]")
def distillation_backward(grad_output: Tensor, *arguments: Any) -> list[Tensor]:
    """Run the engine on an upstream gradient; return the wanted gradients."""
    heads, needs_grad, options = _parsed(arguments)
    with on_device_of(heads.student_input):
        engine = DistillationEngine(make_plan(heads, options, needs_grad), heads, grad_output)
        _, gradients = engine.run()
        return gradients.finished(heads.student, engine.plan.backend)


def _parsed(arguments: Sequence[Any]) -> tuple[Heads, list[bool], DistillationOptions]:
    """Return the operator's arguments as heads, needs_grad and options."""
    count = len(Heads._fields)
    return Heads(*arguments[:count]), list(arguments[count]), DistillationOptions(*arguments[count + 1 :])


@register_fake("lowtide::distillation")
def _(*arguments: Any) -> list[Tensor]:
    heads, needs_grad, options = _parsed(arguments)
    shape = heads.leading if options.reduction == "none" else ()
    outputs = [heads.student_input.new_empty(shape, dtype=options.sum_dtype)]
    for place, (like, grad) in enumerate(zip(heads.student, needs_grad)):
        if grad and like is not None:
            rounded = place == 0 or (place == 1 and not keeps_sum(heads, options, needs_grad))
            kept = (heads.rows, like.shape[-1]) if place == 0 else like.shape
            tensor = like.new_empty(kept, dtype=like.dtype if rounded else options.sum_dtype)
            remains = factor_remains(like.dtype, tensor.dtype, options.sum_dtype)
            factor = like.new_empty((), dtype=options.sum_dtype) if remains else tensor.new_empty(0)
            outputs += [tensor, factor]
    return outputs


@register_fake("lowtide::distillation_backward")
def _(grad_output: Tensor, *arguments: Any) -> list[Tensor]:
    heads, needs_grad, _ = _parsed(arguments)
    pairs = zip(heads.student, needs_grad)
    return [like.new_empty(like.shape) for like, grad in pairs if grad and like is not None]


def _flops(arguments: Sequence[Any]) -> int:
    """Return the FLOPs of a call; tensors come as their shapes here."""
    heads, needs_grad, _ = _parsed(arguments)
    (*leading, D), (V, teacher_D) = heads.student_input, heads.teacher_weight
    return 2 * math.prod(leading) * V * (D * (1 + needs_grad[0] + needs_grad[1]) + teacher_D)


@register_flop_formula(torch.ops.lowtide.distillation)
def _(*arguments: Any, **kwargs: Any) -> int:
    return _flops(arguments)


@register_flop_formula(torch.ops.lowtide.distillation_backward)
def _(grad_output: Any, *arguments: Any, **kwargs: Any) -> int:
    return _flops(arguments)
