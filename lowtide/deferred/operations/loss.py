"""Compute the cross-entropy of deferred logits, by the fused operator or a chunk of rows at a time.

Shapes: [...] are the rows, V classes; C rows of a chunk.
"""

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.core.autodiff import in_shape
from lowtide.core.collectives import is_dtensor
from lowtide.core.errors import ArgumentError
from lowtide.core.rowwise.variables import Tensors
from lowtide.deferred.operations.log_probs import cross_entropy
from lowtide.deferred.proxies.counts import FUSED_LOSS
from lowtide.deferred.proxies.handlers import handles
from lowtide.deferred.proxies.head_call import running_checkpoint
from lowtide.deferred.proxies.logits import DeferredLogits
from lowtide.deferred.recorded import chunks, expression
from lowtide.deferred.recorded.expression import Apply, Linear, Node
from lowtide.deferred.recorded.match_head import LinearHead, match_head
from lowtide.ops.linear_cross_entropy.data_sharded import mean_of_losses
from lowtide.ops.linear_cross_entropy.definition import reference
from lowtide.ops.linear_cross_entropy.definition.head import Labels, Options, normalized
from lowtide.ops.linear_cross_entropy.ranks import messages
from lowtide.ops.linear_cross_entropy.token_count import tokens_per_rank


@handles("cross_entropy", "nll_loss", pass_name=True)
def loss(
    name: str,
    input: DeferredLogits,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Compute cross_entropy of logits, or nll_loss of their log-softmax, which is the same loss."""
    node = input.checked() if name == "cross_entropy" else _below_log_softmax(input.checked())
    is_old = size_average is not None or reduce is not None
    if is_old or node is None or not _supports(input, target, weight, ignore_index):
        return NotImplemented
    rows = expression.hidden(node).shape[:-1]
    if target.is_floating_point():
        target = target.movedim(input.class_dim, -1).reshape(*rows, input.classes)
    else:
        target = target.reshape(rows)
    options = {
        "weight": weight,
        "ignore_index": ignore_index,
        "reduction": reduction,
        "label_smoothing": label_smoothing,
    }
    mesh = expression.data_mesh(node)
    node, head = match_head(node)
    if mesh is None or (head is not None and is_dtensor(head.weights[0])):
        result = loss_of(input, node, head, target, options)
    else:
        result = _loss_of_ranks(input, node, head, target, options, mesh)
    if result is NotImplemented:
        return result
    result = input.head_call.counts.on(result, FUSED_LOSS)
    return in_shape(result, input.rows) if reduction == "none" else result


def _supports(input: DeferredLogits, target: Any, weight: Tensor | None, ignore_index: int) -> bool:
    """Return False for arguments that torch refuses, or that are rare: these need real logits."""
    if input.class_dim != min(input.dim() - 1, 1) or not isinstance(target, Tensor):
        return False
    if target.is_floating_point():
        return target.shape == input.shape and ignore_index < 0
    if target.dtype not in (torch.int64, torch.uint8) or target.shape != input.rows:
        return False
    # CUDA's autocast casts both the logits and the weight.
    casts = input.is_cuda and torch.is_autocast_enabled("cuda")
    return weight is None or weight.dtype == input.dtype or casts


def _loss_of_ranks(
    input: DeferredLogits,
    node: Node,
    head: LinearHead | None,
    target: Tensor,
    options: dict[str, Any],
    mesh: Any,
) -> Any:
    """Return the loss over all ranks, by the whole weights of a head of `lowtide.shard_head`.

    Where the operator takes the divided head, it returns such a loss itself.
    """
    reduction = options["reduction"]
    if reduction == "none":
        return loss_of(input, node, head, target, options, mesh)
    loss = loss_of(input, node, head, target, options | {"reduction": "sum"}, mesh)
    if loss is NotImplemented and reduction == "mean":
        raise ArgumentError(
            "the mean of these logits of a head of lowtide.shard_head would be that of this rank's "
            "tokens; take reduction='sum' and divide by lowtide.tokens_per_rank(target)"
        )
    if loss is NotImplemented:
        return loss
    if reduction == "mean":
        loss = normalized(loss, _tokens_per_rank(mesh, target, options["weight"], options["ignore_index"]))
    return mean_of_losses(loss, mesh)


def loss_of(
    input: DeferredLogits,
    node: Node,
    head: LinearHead | None,
    target: Tensor,
    options: dict[str, Any],
    mesh: Any = None,
) -> Any:
    """Return the loss by the operator or by chunks, which no one has counted.

    It is NotImplemented if real logits are needed.
    """
    weight, workspace = options["weight"], input.head_call.workspace
    if head is None:
        differentiates_weight = weight is not None and weight.requires_grad and torch.is_grad_enabled()
        if differentiates_weight or torch.compiler.is_compiling():  # by_rows supports neither.
            return NotImplemented
        with _raising_together(mesh, target):
            return _by_chunks(node, target, **options, workspace=workspace)
    options = options | head.options | {"workspace": workspace}
    if target.is_floating_point():
        options["ignore_index"] = None
    if is_dtensor(head.weights[0]):
        return cross_entropy(head, target, options)
    return _undivided(input, head, target, options)


def _undivided(input: DeferredLogits, head: LinearHead, target: Tensor, options: dict[str, Any]) -> Tensor:
    """Return the loss of a head that is not divided over ranks.

    A mean or sum forms the gradients in forward, and holds the head's until backward. Losses of
    pieces of the logits would hold one each. So while one does, another of fewer rows than features
    (whose logits take less than the gradient) is computed row by row, which holds a few numbers a
    row and takes one more product.
    """
    counts, reduction = input.head_call.counts, options["reduction"]
    features = sum(each.shape[-1] for each in head.weights if each.requires_grad)
    # The two runs of a checkpoint have to choose alike.
    chooses = not torch.compiler.is_compiling() and running_checkpoint() is None
    if reduction == "none" or features == 0 or not chooses or not torch.is_grad_enabled():
        return cross_entropy(head, target, options)
    if counts.holds_gradient and input.rows.numel() < features:
        loss = cross_entropy(head, target, options | {"reduction": "none"})
        return _reduced(loss, target, options["weight"], options["ignore_index"], reduction)
    loss = cross_entropy(head, target, options)
    counts.hold(loss)
    return loss


def _by_chunks(
    node: expression.Node,
    target: Tensor,  # [...] class indices, or [..., V] class probabilities
    weight: Tensor | None,  # [V]
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    workspace: int | None,
) -> Tensor:
    """Return torch's cross_entropy of the logits, in float32 if the logits are half precision."""

    def losses(z_CV: Tensor, target_C: Tensor, *weights: Tensor) -> Tensors:
        options: dict[str, Any] = {"reduction": "none", "label_smoothing": label_smoothing}
        wide = torch.promote_types(z_CV.dtype, torch.float32)
        weight_V = weights[0].to(wide) if weights else None
        with torch.autocast(z_CV.device.type, enabled=False):
            return (F.cross_entropy(z_CV.to(wide), target_C, weight_V, ignore_index=ignore_index, **options),)

    others = () if weight is None else (weight,)
    shape = expression.hidden(node).shape[:-1]
    (loss,) = chunks.by_rows(node, shape, 1, losses, target, others=others, copies=4, workspace=workspace)
    return _reduced(loss, target, weight, ignore_index, reduction)


def _reduced(
    loss: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str
) -> Tensor:
    """Reduce the losses of rows as cross_entropy does."""
    return reference.reduce(
        loss.flatten(),
        Labels(reference.flat_target(target), weight),
        Options(reduction=reduction, ignore_index=ignore_index),
    )


def _raising_together(mesh: Any, target: Tensor) -> contextlib.AbstractContextManager[None]:
    """Raise one rank's error (such as a target that is no class) on all ranks of the loss."""
    if mesh is None or target.device.type != "cpu":  # only on a CPU do targets raise an error
        return contextlib.nullcontext()
    return messages.raising_together(mesh.get_group().group_name)


def _tokens_per_rank(mesh: Any, target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """Return the divisor of the summed loss; with class probabilities each row counts 1."""
    if not target.is_floating_point():
        return tokens_per_rank(target, group=mesh, ignore_index=ignore_index, weight=weight)
    return tokens_per_rank(torch.zeros_like(target[..., 0], dtype=torch.long), group=mesh)


def _below_log_softmax(node: Node) -> Node | None:
    """Return the operand of a log-softmax, even if the result was cast or detached; else None."""
    if isinstance(node, Linear):
        return None
    if node.name == "log_softmax":
        return node.first
    if node.name == "to" and node.dtype != torch.float64:
        return _below_log_softmax(node.first)
    below = _below_log_softmax(node.first) if node.name == "detach" else None
    return None if below is None else Apply("detach", (below,), None, below.dtype)
