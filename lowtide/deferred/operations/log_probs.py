"""Compute log-probabilities, logsumexp and picked logits of deferred logits by the fused operator.

Shapes: [...] are the rows, V classes; C rows of a chunk, K numbers picked from each.
"""

from typing import Any

import torch
from torch import Tensor

from lowtide.core.autodiff import in_shape, in_transform
from lowtide.core.checks import HALVES
from lowtide.core.rowwise.variables import Tensors
from lowtide.deferred.operations.row_values import by_rows, class_dim, counted
from lowtide.deferred.proxies.counts import FUSED_LOSS
from lowtide.deferred.proxies.handlers import handles
from lowtide.deferred.proxies.head_call import HeadCall, HeadPass
from lowtide.deferred.proxies.logits import DeferredLogits
from lowtide.deferred.recorded import expression
from lowtide.deferred.recorded.expression import Apply, Linear, Node, Vector
from lowtide.deferred.recorded.match_head import LinearHead, match_head
from lowtide.ops.linear_cross_entropy import dispatch, linear_cross_entropy, linear_log_probs
from lowtide.ops.linear_cross_entropy.definition.validation import NO_CLASS


@handles("logsumexp")
def logsumexp(input: DeferredLogits, dim: Any, keepdim: bool = False) -> Any:
    place = class_dim(input, dim)
    if place is None:
        return NotImplemented
    node = input.checked()
    _, head = match_head(node)
    if head is None:
        (result,) = by_rows(input, 1, lambda z_CV: (z_CV.logsumexp(-1),), copies=2)
    else:
        result = in_shape(one_pass(input.head_call, node, head).logsumexp.clone(), input.rows)
    result = counted(input, result)
    return result.unsqueeze(place) if keepdim else result


@handles("gather")
def gather(input: DeferredLogits, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
    if not input.classes_last or class_dim(input, dim) is None:
        return NotImplemented
    if not isinstance(index, Tensor) or index.dtype != torch.int64 or index.shape[:-1] != input.rows:
        return NotImplemented
    node = input.checked()
    if index.shape[-1] == 1:
        flat, call = index.reshape(expression.hidden(node).shape[:-1]), input.head_call
        picked = _picked(node, flat, call)
        if picked is None:
            picked = _picked_logits(node, flat, call)
        if picked is not None:
            # A function of log-probabilities (exp) may have saved its result for backward.
            saved = isinstance(node, Apply) and node.name != "log_softmax"
            return counted(input, in_shape(picked.clone() if saved else picked, index.shape))
    (result,) = by_rows(input, 1, lambda z_CV, index_CK: (z_CV.gather(-1, index_CK),), index, picks=True)
    return counted(input, result)


@handles("take_along_dim")
def take_along_dim(input: DeferredLogits, indices: Any, dim: int | None = None) -> Any:
    if class_dim(input, dim) is None or not isinstance(indices, Tensor) or indices.dtype != torch.int64:
        return NotImplemented
    # Unlike gather it counts negative indices from the end.
    return gather(input, dim, torch.where(indices < 0, indices + input.classes, indices))  # type: ignore[arg-type]


def _picked(node: Node, index: Tensor, call: HeadCall) -> Tensor | None:
    """Return each row's value at class `index` if the node computes on a softmax, else None.

    The log-probability is computed for that class only, and the later operations are applied to it.
    """
    if isinstance(node, Linear) or any(isinstance(each, Vector) for each in node.operands):
        return None
    below, rest = node.first, node.operands[1:]
    if node.name in expression.MIX_CLASSES:
        _, head = match_head(below)
        if head is None:
            return None
        log_prob = one_pass(call, below, head, index).log_prob
        return log_prob if node.name == "log_softmax" else log_prob.exp().to(node.dtype)
    if any(isinstance(each, (Linear, Apply)) for each in rest):
        return None
    picked = _picked(below, index, call)
    return None if picked is None else expression.FUNCTIONS[node.name](picked, *rest)


def _picked_logits(node: Node, index: Tensor, call: HeadCall) -> Tensor | None:
    """Return each row's logit of class `index` if the head computes in half precision, else None.

    The logit is float32 and not rounded, like the logsumexp. For a confident token the two are
    nearly equal: if one of them were rounded, their difference would be mostly rounding error.
    """
    _, head = match_head(node)
    if head is None or head.dtype not in HALVES:
        return None
    found = one_pass(call, node, head, index)
    return found.log_prob + found.logsumexp


def log_probs(input: Any, target: Tensor) -> dispatch.LogProbs:
    """Return the results of lowtide.linear_log_probs for logits [..., V] and targets [...].

    The logits are deferred or real. Deferred logits take one pass if the operators support the
    head; this pass counts as a fused loss.
    """
    deferred = isinstance(input, DeferredLogits) and input.classes_last and input.known is None
    node = input.checked() if deferred else None
    head = None if node is None else match_head(node)[1]
    if node is not None and head is not None:
        flat = target.reshape(head.inputs[0].shape[:-1])
        results = one_pass(input.head_call, node, head, flat)
        first = input.head_call.counts.on(results.log_prob, FUSED_LOSS)
        own = first, *(each.clone() for each in results[1:])
        return dispatch.LogProbs(*(in_shape(each, input.rows) for each in own))
    if deferred:
        first, *others = by_rows(input, 4, _log_probs_of_rows, target, copies=6)
        return dispatch.LogProbs(counted(input, first), *others)
    return dispatch.LogProbs(*_log_probs_of_rows(input, target))


def _log_probs_of_rows(z_V: Any, target: Tensor) -> Tensors:
    log_p = z_V.to(torch.promote_types(z_V.dtype, torch.float32)).log_softmax(-1)
    return (
        log_p.gather(-1, target[..., None])[..., 0],
        -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0)).sum(-1),
        z_V.to(log_p.dtype).logsumexp(-1),
        z_V.argmax(-1),
    )


def one_pass(call: HeadCall, node: Node, head: LinearHead, target: Tensor | None = None) -> dispatch.LogProbs:
    """Return the log-probability of the target, and all that a pass over the classes gives beside.

    The head computes the node's logits. Without a target the log-probability is that of any class,
    and the last pass of this call of the head may have found the rest. Then backward takes one pass
    for both. So all results but the log-probability are shared, and only copies of them leave this
    package.
    """
    # The two runs of a checkpoint have to save the same tensors.
    alone = torch.compiler.is_compiling() or in_transform(head.inputs[0]) or call.in_other_checkpoint
    last, grad = None if alone else call.last_pass, torch.is_grad_enabled()
    if target is None and last is not None and last.serves(node, head, grad):
        return last.results
    results = _log_probs(head, _any_class(head) if target is None else target, call.workspace)
    if not alone:
        call.last_pass = HeadPass(node, head, grad, results)
    return results


def _any_class(head: LinearHead) -> Tensor:
    return torch.zeros(head.inputs[0].shape[:-1], dtype=torch.long, device=head.inputs[0].device)


def smoothed_loss(call: HeadCall, head: LinearHead) -> Tensor:
    """Return - 1/V sum log p of each row: the cross-entropy with a label smoothing of 1."""
    options = head.options | {"ignore_index": NO_CLASS, "workspace": call.workspace}
    options |= {"reduction": "none", "label_smoothing": 1.0}
    target = _any_class(head)
    return cross_entropy(head, target, options)


def cross_entropy(head: LinearHead, target: Tensor, options: dict[str, Any]) -> Tensor:
    """Return the loss of a head by the operator."""
    with expression.autocast(target.device, head.autocast):
        if len(head.weights) == 1:  # The public function remembers such calls.
            return linear_cross_entropy(head.inputs[0], head.weights[0], target, **options)
        return dispatch.cross_entropy(head.inputs, head.weights, target, **options)


def _log_probs(head: LinearHead, target: Tensor, workspace: int | None) -> dispatch.LogProbs:
    options = head.options | {"ignore_index": NO_CLASS, "workspace": workspace}
    with expression.autocast(target.device, head.autocast):
        if len(head.weights) == 1:
            return linear_log_probs(head.inputs[0], head.weights[0], target, **options)
        return dispatch.log_probs(head.inputs, head.weights, target, **options)
