"""Compute torch's kl_div of deferred logits: by distillation's operator, or as a cross-entropy.

Shapes: [...] are the rows, V classes; C rows of a chunk.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.core.collectives import is_dtensor
from lowtide.core.rowwise.variables import Tensors
from lowtide.deferred.operations.loss import loss_of
from lowtide.deferred.operations.row_values import counted
from lowtide.deferred.proxies.handlers import handles
from lowtide.deferred.proxies.logits import DeferredLogits
from lowtide.deferred.recorded import chunks, expression
from lowtide.deferred.recorded.expression import Node, below
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
    """Compute kl_div of a deferred student's log-softmax and a teacher without gradients.

    The operator of distillation takes a teacher whose logits are deferred too, and divided by the
    same temperature. With any other teacher the gradient is that of the cross-entropy,

        sum p (log p - log q) = - sum p log q - H(p)

    and the value is computed a chunk of rows at a time. The divergences of single classes need real
    logits.
    """
    divisors = {"sum": 1, "mean": input.meta.numel(), "batchmean": len(input.meta)}
    is_old = size_average is not None or reduce is not None
    if is_old or reduction not in divisors or torch.compiler.is_compiling():
        return NotImplemented
    known = isinstance(target, Tensor | DeferredLogits) and target.shape == input.shape
    node = input.checked()
    attached = _attached(node)
    logits = below(attached, "log_softmax")
    if not known or target.requires_grad or not input.classes_last or logits is None:
        return NotImplemented
    # A divided head takes no class probabilities, and the sum of one over data-parallel ranks would
    # be that of all ranks' tokens.
    if expression.is_sharded(node) or expression.data_mesh(node) is not None:
        return NotImplemented
    with torch.set_grad_enabled(torch.is_grad_enabled() and attached is node):
        total = _of_heads(input, logits, target, log_target)
        if total is None:
            total = _of_probabilities(input, logits, target, log_target)
    if total is NotImplemented:
        return total
    # Like other losses it is float32 for half precision, also where autocast makes torch's so.
    wider = torch.promote_types(input.dtype, target.dtype)
    return (total / divisors[reduction]).to(torch.promote_types(wider, torch.float32))


def _of_heads(input: DeferredLogits, logits: Node, target: Any, log_target: bool) -> Tensor | None:
    """Return the sum over all rows by the operator of distillation; None if it does not apply."""
    if not isinstance(target, DeferredLogits) or target.known is not None or not target.classes_last:
        return None
    of_teacher = below(_attached(target.checked()), "log_softmax" if log_target else "softmax")
    student, teacher = _head(logits), None if of_teacher is None else _head(of_teacher)
    if student is None or teacher is None or not _agree(student, teacher):
        return None
    options = _options("student", student) | _options("teacher", teacher)
    options |= {"temperature": _temperature(student), "workspace": input.head_call.workspace}
    with expression.autocast(input.device, student.autocast):
        total = forward_kl(*_operands(student), *_operands(teacher), reduction="sum", **options)
    input.head_call.counts.hold(total)
    return counted(input, total)


def _of_probabilities(input: DeferredLogits, logits: Node, target: Any, log_target: bool) -> Any:
    """Return the sum over all rows, given the teacher's real probabilities or their logarithms."""
    if isinstance(target, DeferredLogits):
        target = target.real("torch.kl_div")
    node, head = match_head(logits)
    shape, workspace = expression.hidden(node).shape[:-1], input.head_call.workspace
    target = target.reshape(*shape, input.classes)
    # The cross-entropy has too few digits left for its small difference from the entropy. So the
    # value is computed from rows, at the price of one more product (decision 0102). Rows keep the
    # target for their gradient, and the cross-entropy does not.
    with torch.set_grad_enabled(torch.is_grad_enabled() and head is None):
        rows = functools.partial(_of_rows, log_target=log_target)
        (losses,) = chunks.by_rows(node, shape, 1, rows, target, copies=4, workspace=workspace)
        total = losses.sum()
    if head is not None and torch.is_grad_enabled() and expression.requires_grad(node):
        p = target.exp() if log_target else target
        options = {"weight": None, "ignore_index": -100, "label_smoothing": 0.0, "reduction": "sum"}
        total = _with_gradient_of(loss_of(input, node, head, p, options), total)
    return counted(input, total)


def _of_rows(z_CV: Tensor, target_CV: Tensor, *, log_target: bool) -> Tensors:
    """Return the divergence of each row, as torch computes it, in float32 at least."""
    wide = torch.promote_types(torch.promote_types(z_CV.dtype, target_CV.dtype), torch.float32)
    with torch.autocast(z_CV.device.type, enabled=False):
        log_q_CV = z_CV.to(wide).log_softmax(-1)
        each_CV = F.kl_div(log_q_CV, target_CV.to(wide), reduction="none", log_target=log_target)
        return (each_CV.sum(-1),)


def _with_gradient_of(loss: Tensor, value: Tensor) -> Tensor:
    """Return the value, which is differentiated as the loss."""
    zero = torch.where(loss.isinf(), loss, loss - loss.detach())  # inf - inf would be NaN
    return value + zero


def _attached(node: Node) -> Node:
    """Return the node before it was detached."""
    while (first := below(node, "detach")) is not None:
        node = first
    return node


def _head(logits: Node) -> LinearHead | None:
    """Return the head of these logits, if it is one product that is not divided over ranks."""
    head = match_head(logits)[1]
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
    return head.inputs[0].reshape(-1, head.inputs[0].shape[-1]), head.weights[0]


def _options(name: str, head: LinearHead) -> dict[str, Any]:
    """Return bias and cap of a head, whose cap is that of the logits before they are divided."""
    cap = None if head.cap is None else head.cap * _temperature(head)
    return {f"{name}_bias": head.bias, f"{name}_softcap": cap}
