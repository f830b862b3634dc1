"""Reduce deferred logits to one number, or to one number for each row.

The fused operators compute losses and log-probabilities. Everything else is computed one chunk of
rows at a time.

Shapes: [...] are the rows, V classes; C rows of a chunk, K numbers picked from each.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowtide.core.autodiff import in_shape
from lowtide.core.checks import HALVES
from lowtide.core.collectives import is_dtensor
from lowtide.core.errors import ArgumentError
from lowtide.deferred.operations.elementwise import is_class_dim
from lowtide.deferred.proxies.counts import FUSED_LOSS
from lowtide.deferred.proxies.handlers import handles
from lowtide.deferred.proxies.head_call import running_checkpoint
from lowtide.deferred.proxies.logits import NO_GRADIENT, DeferredLogits
from lowtide.deferred.recorded import chunks, expression
from lowtide.deferred.recorded.expression import Apply, Linear, Node, Vector
from lowtide.deferred.recorded.match_head import LinearHead, match_head
from lowtide.ops.linear_cross_entropy import dispatch, linear_cross_entropy, linear_log_probs
from lowtide.ops.linear_cross_entropy.data_sharded import mean_of_losses
from lowtide.ops.linear_cross_entropy.definition.head import normalized
from lowtide.ops.linear_cross_entropy.definition.validation import NO_CLASS
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
    if size_average is not None or reduce is not None:
        return NotImplemented
    node = input.checked() if name == "cross_entropy" else _below_log_softmax(input.checked())
    if node is None:
        return NotImplemented
    options = {"reduction": reduction, "label_smoothing": label_smoothing}
    return _loss(input, node, target, weight, ignore_index, options)


def _loss(
    input: DeferredLogits,
    node: Node,
    target: Any,
    weight: Tensor | None,
    ignore_index: int,
    options: dict[str, Any],
) -> Any:
    """Return the loss by the operator or by chunks; NotImplemented if real logits are needed."""
    if input.class_dim != min(input.dim() - 1, 1) or not isinstance(target, Tensor):
        return NotImplemented
    probabilities = target.is_floating_point()
    if not probabilities and target.dtype not in (torch.int64, torch.uint8):
        return NotImplemented  # torch raises its own error.
    if target.shape != (input.shape if probabilities else input.rows):
        return NotImplemented
    if probabilities and ignore_index >= 0:
        return NotImplemented
    mixed = weight is not None and not probabilities and weight.dtype != input.dtype
    # CUDA's autocast casts both the logits and the weight.
    if mixed and not (input.is_cuda and torch.is_autocast_enabled("cuda")):
        return NotImplemented
    rows = expression.hidden(node).shape[:-1]
    if probabilities:
        target = target.movedim(input.class_dim, -1).reshape(*rows, input.classes)
    else:
        target = target.reshape(rows)
    mesh, reduction = expression.data_mesh(node), options["reduction"]
    node, head = _matched(node)
    if head is not None and is_dtensor(head.weights[0]):
        mesh = None  # The operator returns the loss over all ranks.
    if mesh is not None and reduction == "mean":
        options = options | {"reduction": "sum"}
    options = options | {"workspace": input.head_call.workspace}
    differentiates_weight = weight is not None and weight.requires_grad and torch.is_grad_enabled()
    if head is not None:
        options |= head.options | {"ignore_index": None if probabilities else ignore_index}
        with expression.autocast(target.device, head.autocast):
            if is_dtensor(head.weights[0]):
                loss = linear_cross_entropy(head.inputs[0], head.weights[0], target, weight=weight, **options)
            else:
                loss = _undivided(input, head, target, weight, ignore_index, options)
    elif differentiates_weight or torch.compiler.is_compiling():  # by_rows supports neither.
        if mesh is not None and reduction == "mean":
            raise ArgumentError(
                "the mean of these logits of a head of lowtide.shard_head would be that of this rank's "
                "tokens; take reduction='sum' and divide by lowtide.tokens_per_rank(target)"
            )
        return NotImplemented
    else:
        with _raising_together(mesh, target):
            loss = chunks.cross_entropy(node, target, weight, ignore_index, **options)
    if mesh is not None and reduction != "none":
        if reduction == "mean":
            loss = normalized(loss, _tokens_per_rank(mesh, target, weight, ignore_index))
        loss = mean_of_losses(loss, mesh)
    loss = input.head_call.counts.on(loss, FUSED_LOSS)
    return in_shape(loss, input.rows) if options["reduction"] == "none" else loss


def _undivided(
    input: DeferredLogits,
    head: LinearHead,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    options: dict[str, Any],
) -> Tensor:
    """Return the loss of a head that is not divided over ranks.

    A mean or sum forms the gradients in forward, and holds the head's until backward. Losses of
    pieces of the logits would hold one each. So while one does, another of fewer rows than features
    (whose logits take less than the gradient) is computed row by row, which holds a few numbers a
    row and takes one more product.
    """
    counts, reduction = input.head_call.counts, options["reduction"]
    call = functools.partial(dispatch.cross_entropy, head.inputs, head.weights, target, weight=weight)
    features = sum(each.shape[-1] for each in head.weights if each.requires_grad)
    # The two runs of a checkpoint have to choose alike.
    chooses = not torch.compiler.is_compiling() and running_checkpoint() is None
    if reduction == "none" or features == 0 or not chooses or not torch.is_grad_enabled():
        return call(**options)
    if counts.holds_gradient and input.rows.numel() < features:
        loss = call(**options | {"reduction": "none"})
        return chunks.reduced(loss, target, weight, ignore_index, reduction)
    loss = call(**options)
    counts.hold(loss)
    return loss


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


def _matched(node: Node) -> tuple[Node, LinearHead | None]:
    """Return the node and the head that the operators take, or None for the head.

    The operators take a head divided over ranks only if it is a single product. The weights of any
    other divided head are gathered first.
    """
    head = match_head(node)
    if expression.is_sharded(node) and (head is None or len(head.weights) > 1):
        node = expression.with_whole_weights(node)
        head = match_head(node)
    return node, head


def _below_log_softmax(node: Node) -> Node | None:
    """Return the operand of a log-softmax, even if the result was cast or detached; else None."""
    if isinstance(node, Linear):
        return None
    operand: Node = node.operands[0]  # type: ignore[assignment]
    if node.name == "log_softmax":
        return operand
    if node.name == "to" and node.dtype != torch.float64:
        return _below_log_softmax(operand)
    below = _below_log_softmax(operand) if node.name == "detach" else None
    return None if below is None else Apply("detach", (below,), None, below.dtype)


@handles("grad", anywhere=True)
def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse torch.autograd.grad with respect to deferred logits."""
    if any(isinstance(each, DeferredLogits) for each in inputs):
        raise RuntimeError(f"torch.autograd.grad: {NO_GRADIENT}")
    return NotImplemented


@handles("logsumexp")
def logsumexp(input: DeferredLogits, dim: Any, keepdim: bool = False) -> Any:
    place = _class_dim(input, dim)
    if place is None:
        return NotImplemented
    _, head = _matched(input.checked())
    if head is None:
        return _counted(input, _reduced(input, dim, keepdim, lambda z_CV: z_CV.logsumexp(-1)))
    target = torch.zeros(head.inputs[0].shape[:-1], dtype=torch.long, device=input.device)
    found = in_shape(_log_probs(head, target, input.head_call.workspace).logsumexp, input.rows)
    result = _counted(input, found)
    return result.unsqueeze(place) if keepdim else result


@handles("gather")
def gather(input: DeferredLogits, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
    if not input.classes_last or _class_dim(input, dim) is None:
        return NotImplemented
    if not isinstance(index, Tensor) or index.dtype != torch.int64 or index.shape[:-1] != input.rows:
        return NotImplemented
    node = input.checked()
    if index.shape[-1] == 1:
        flat, workspace = index.reshape(expression.hidden(node).shape[:-1]), input.head_call.workspace
        picked = _picked(node, flat, workspace)
        if picked is None:
            picked = _picked_logits(node, flat, workspace)
        if picked is not None:
            # A function of log-probabilities (exp) may have saved its result for backward.
            saved = isinstance(node, Apply) and node.name != "log_softmax"
            return _counted(input, in_shape(picked.clone() if saved else picked, index.shape))
    (result,) = _pick(input, 1, lambda z_CV, index_CK: (z_CV.gather(-1, index_CK),), index)
    return _counted(input, result)


def _picked(node: Node, index: Tensor, workspace: int | None) -> Tensor | None:
    """Return each row's value at class `index` if the node computes on a log-softmax, else None.

    The log-probability is computed for that class only, and the later operations are applied to it.
    """
    if isinstance(node, Linear) or any(isinstance(each, Vector) for each in node.operands):
        return None
    below, *rest = node.operands
    if node.name == "log_softmax":
        _, head = _matched(below)  # type: ignore[arg-type]
        return None if head is None else _log_probs(head, index, workspace).log_prob
    if node.name == "softmax" or any(isinstance(each, (Linear, Apply)) for each in rest):
        return None
    picked = _picked(below, index, workspace)  # type: ignore[arg-type]
    return None if picked is None else expression.FUNCTIONS[node.name](picked, *rest)


def _picked_logits(node: Node, index: Tensor, workspace: int | None) -> Tensor | None:
    """Return each row's logit of class `index` if the head computes in half precision, else None.

    The logit is float32 and not rounded, like the logsumexp. For a confident token the two are
    nearly equal: if one of them were rounded, their difference would be mostly rounding error.
    """
    _, head = _matched(node)
    if head is None or head.dtype not in HALVES:
        return None
    found = _log_probs(head, index, workspace)
    return found.log_prob + found.logsumexp


def log_probs(input: Any, target: Tensor) -> dispatch.LogProbs:
    """Return the results of lowtide.linear_log_probs for logits [..., V] and targets [...].

    The logits are deferred or real. Deferred logits take one pass if the operators support the
    head; this pass counts as a fused loss.
    """
    deferred = isinstance(input, DeferredLogits) and input.classes_last and input.known is None
    head = _matched(input.checked())[1] if deferred else None
    if head is not None:
        flat = target.reshape(head.inputs[0].shape[:-1])
        results = _log_probs(head, flat, input.head_call.workspace)
        first = input.head_call.counts.on(results.log_prob, FUSED_LOSS)
        return dispatch.LogProbs(*(in_shape(each, input.rows) for each in results._replace(log_prob=first)))
    log_p = input.float().log_softmax(-1)
    return dispatch.LogProbs(
        log_p.gather(-1, target[..., None])[..., 0],
        -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0)).sum(-1),
        input.float().logsumexp(-1),
        input.argmax(-1),
    )


def _log_probs(head: LinearHead, target: Tensor, workspace: int | None) -> dispatch.LogProbs:
    options = head.options | {"ignore_index": NO_CLASS, "workspace": workspace}
    with expression.autocast(target.device, head.autocast):
        if is_dtensor(head.weights[0]):
            return linear_log_probs(head.inputs[0], head.weights[0], target, **options)
        return dispatch.log_probs(head.inputs, head.weights, target, **options)


@handles("argmax", "sum", "mean", pass_name=True)
def reduce(
    name: str, input: DeferredLogits, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    options = {} if dtype is None else {"dtype": dtype}
    return _counted(input, _reduced(input, dim, keepdim, lambda z_CV: getattr(z_CV, name)(-1, **options)))


@handles("amax")
def amax(input: DeferredLogits, dim: Any = (), keepdim: bool = False) -> Any:
    place = _class_dim(input, dim)
    if place is None:
        return NotImplemented
    (result,) = _pick(input, 1, lambda z_CV: (z_CV.amax(-1),))
    return result.unsqueeze(place) if keepdim else result


@handles("max")
def max_(input: DeferredLogits, dim: Any = None, keepdim: bool = False) -> Any:
    place = _class_dim(input, dim)
    if place is None:
        return NotImplemented
    results = _pick(input, 2, lambda z_CV: tuple(z_CV.max(-1)))
    return torch.return_types.max(each.unsqueeze(place) if keepdim else each for each in results)


@handles("topk")
def topk(input: DeferredLogits, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    if not input.classes_last or _class_dim(input, dim) is None:
        return NotImplemented
    return torch.return_types.topk(_pick(input, 2, lambda z_CV: tuple(z_CV.topk(k, -1, largest, sorted))))


def _reduced(input: DeferredLogits, dim: Any, keepdim: bool, function: Callable[[Tensor], Tensor]) -> Any:
    place = _class_dim(input, dim)
    if place is None:
        return NotImplemented
    (result,) = _by_rows(input, 1, lambda z_CV: (function(z_CV),))
    return result.unsqueeze(place) if keepdim else result


def _counted(input: DeferredLogits, result: Any) -> Any:
    """Count a result of the rows that a loss can be made of, as a loss without logits."""
    if not isinstance(result, Tensor) or not result.requires_grad:
        return result
    return input.head_call.counts.on(result, FUSED_LOSS)


def _class_dim(input: DeferredLogits, dim: Any) -> int | None:
    """Return the dimension of the classes if `dim` names only that one, else None."""
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        (dim,) = dim
    return input.class_dim if is_class_dim(input, dim) else None


def _by_rows(
    input: DeferredLogits,
    results: int,
    function: chunks.RowFunction,
    *row_tensors: Tensor,
    chunk_sizes: dict[Any, int] | None = None,
) -> tuple[Tensor, ...]:
    options: dict[str, Any] = {"workspace": input.head_call.workspace, "chunk_sizes": chunk_sizes}
    return chunks.by_rows(input.checked(), input.rows, results, function, *row_tensors, **options)


def _pick(
    input: DeferredLogits, results: int, function: chunks.RowFunction, *row_tensors: Tensor
) -> tuple[Tensor, ...]:
    """Return values that are logits themselves; logits made real later will have the same bits."""
    sizes = input.head_call.chunk_sizes
    return _by_rows(input, results, function, *row_tensors, chunk_sizes=sizes)
