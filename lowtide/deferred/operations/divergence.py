"""Compute the KL divergence of two heads' deferred logits by the operator of distillation."""

from typing import Any

import torch
from torch import Tensor

from lowtide.core.collectives import is_dtensor
from lowtide.deferred.operations.row_values import counted
from lowtide.deferred.proxies.handlers import handles
from lowtide.deferred.proxies.logits import DeferredLogits
from lowtide.deferred.recorded import expression
from lowtide.deferred.recorded.expression import Apply, Node
from lowtide.deferred.recorded.match_head import LinearHead, match_head
from lowtide.ops.distillation import forward_kl


@handles("kl_div")
def kl_div(
    input: DeferredLogits,
    target: Any,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    log_target: bool = False,
) -> Any:
    """Compute kl_div of the student's log-softmax and the teacher's softmax, or log-softmax.

    Both are deferred, and the teacher needs no gradient. Their logits are divided by one
    temperature. The divergences of single classes need real logits.
    """
    divisors = {"sum": 1, "mean": input.meta.numel(), "batchmean": len(input.meta)}
    is_old = size_average is not None or reduce is not None
    if is_old or reduction not in divisors or torch.compiler.is_compiling():
        return NotImplemented
    if not isinstance(target, DeferredLogits) or target.known is not None or target.requires_grad:
        return NotImplemented
    if target.shape != input.shape or not (input.classes_last and target.classes_last):
        return NotImplemented
    student = _head(input.checked(), "log_softmax")
    teacher = _head(target.checked(), "log_softmax" if log_target else "softmax")
    if student is None or teacher is None or not _agree(student, teacher):
        return NotImplemented
    options = _options("student", student) | _options("teacher", teacher)
    options |= {"temperature": _temperature(student), "workspace": input.head_call.workspace}
    with expression.autocast(input.device, student.autocast):
        total = forward_kl(*_operands(student), *_operands(teacher), reduction="sum", **options)
    input.head_call.counts.hold(total)
    return counted(input, (total / divisors[reduction]).to(input.dtype))


def _head(node: Node, name: str) -> LinearHead | None:
    """Return the head of whose logits the node is a softmax of this name, as one product."""
    while isinstance(node, Apply) and node.name == "detach":
        node = node.first
    head = match_head(node.first)[1] if isinstance(node, Apply) and node.name == name else None
    return None if head is None or len(head.weights) > 1 or is_dtensor(head.weights[0]) else head


def _agree(student: LinearHead, teacher: LinearHead) -> bool:
    """Return whether the operator takes both heads: their scale is that of one temperature."""
    numbers = not isinstance(student.factor, Tensor) and not isinstance(teacher.factor, Tensor)
    biases = all(each.bias is None or each.bias.dtype == each.dtype for each in (student, teacher))
    if not numbers or not biases or student.factor <= 0:  # type: ignore[operator]
        return False
    same = (student.factor, student.autocast, student.sum_dtype)
    return same == (teacher.factor, teacher.autocast, teacher.sum_dtype)


def _temperature(head: LinearHead) -> float:
    return 1 / head.factor  # type: ignore[return-value, operator]


def _operands(head: LinearHead) -> tuple[Tensor, Tensor]:
    return head.inputs[0].flatten(0, -2), head.weights[0]


def _options(name: str, head: LinearHead) -> dict[str, Any]:
    """Return bias and cap of a head, whose cap is that of the logits before they are divided."""
    cap = None if head.cap is None else head.cap * _temperature(head)
    return {f"{name}_bias": head.bias, f"{name}_softcap": cap}
