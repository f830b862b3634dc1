"""Compute argmax, sums and means over the classes of deferred logits.

Entropies and sums of log-probabilities are by the fused operators. All else is a chunk of rows at a
time.

Shapes: [...] are the rows, V classes; C rows of a chunk.
"""

import math
from typing import Any

import torch
from torch import Tensor

from lowtide.core.autodiff import in_shape
from lowtide.deferred.operations.log_probs import one_pass, smoothed_loss
from lowtide.deferred.operations.row_values import by_rows, class_dim, counted, of_classes
from lowtide.deferred.proxies.handlers import handles
from lowtide.deferred.proxies.head_call import HeadCall
from lowtide.deferred.proxies.logits import DeferredLogits
from lowtide.deferred.recorded.expression import Apply, Linear, Node, below
from lowtide.deferred.recorded.match_head import LinearHead, match_head


@handles("argmax", "sum", "mean", pass_name=True)
def reduce(
    name: str, input: DeferredLogits, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    options = {} if dtype is None else {"dtype": dtype}
    dims = _dims_with_classes(input, dim)
    if name != "argmax" and dims and class_dim(input, dim) is None:
        return _total(name, input, dims, keepdim, options)
    expected = None if name == "argmax" else _of_distribution(name, input, dim, options)
    if expected is not None:
        return counted(input, expected.unsqueeze(input.class_dim) if keepdim else expected)
    results = of_classes(input, dim, keepdim, 1, lambda z_CV: (getattr(z_CV, name)(-1, **options),))
    return NotImplemented if results is None else counted(input, results[0])


def _dims_with_classes(input: DeferredLogits, dim: Any) -> tuple[int, ...]:
    """Return the dimensions that `dim` names if the one of the classes is among them, else ()."""
    named = tuple(dim) if isinstance(dim, (tuple, list)) else () if dim is None else (dim,)
    if not all(isinstance(each, int) and -input.dim() <= each < input.dim() for each in named):
        return ()
    dims = tuple({each % input.dim() for each in named or range(input.dim())})
    # torch raises its own error for a dimension that is named twice.
    return dims if input.class_dim in dims and len(named) in (0, len(dims)) else ()


def _total(name: str, input: DeferredLogits, dims: tuple[int, ...], keepdim: bool, options: Any) -> Any:
    """Sum or average over classes and rows, in float32 at least, as torch does."""
    dtype = getattr(torch.empty((), dtype=input.dtype, device=input.device), name)(**options).dtype
    if torch.compiler.is_compiling() or not dtype.is_floating_point:  # the first would break the graph
        return NotImplemented
    wide = torch.promote_types(dtype, torch.float32)
    (sums,) = by_rows(input, 1, lambda z_CV: (z_CV.sum(-1, dtype=wide),))
    total = sums.unsqueeze(input.class_dim).sum(dims, keepdim)
    if name == "mean":
        total = total / math.prod(input.shape[each] for each in dims)
    return counted(input, total.to(dtype))


def _of_distribution(name: str, input: DeferredLogits, dim: Any, options: Any) -> Tensor | None:
    """Return the sum or mean of a product over the classes by the operators; None of most products.

    With p the softmax of the logits z, and H the entropy of p, they compute

        sum p log p = -H        sum p z = logsumexp(z) - H        sum log p = -V loss

    times a number. The loss is the cross-entropy that is smoothed over all classes alike. The
    second is as far off as the logsumexp, from which people subtract it to find H. So like the
    logsumexp it is float32 for half-precision logits, and not rounded.
    """
    dtype = options.get("dtype", input.dtype)
    # torch casts what it adds, and rounds each number to an integer.
    if class_dim(input, dim) is None or not dtype.is_floating_point or torch.compiler.is_compiling():
        return None
    node = input.checked()
    factor, factors = _factors(node)
    total = _sum_of_product(factors, input.head_call)
    if total is None:
        return None
    share = input.classes if name == "mean" else 1
    result = in_shape(total * (factor / share), input.rows)
    of_logits = all(below(each, "log_softmax") is None for each in factors)
    return result if of_logits and not options else result.to(dtype)


def _sum_of_product(factors: list[Node], call: HeadCall) -> Tensor | None:
    """Return the sum over the classes of a product of these nodes, if the operators have it."""
    if len(factors) == 1 and (logits := below(factors[0], "log_softmax")) is not None:
        head = match_head(logits)[1]
        return None if head is None else -head.classes * smoothed_loss(call, head)
    for probabilities, other in (factors, factors[::-1]) if len(factors) == 2 else ():
        logits, of_log = _below_softmax(probabilities), below(other, "log_softmax")
        own = other if of_log is None else of_log
        head = None if logits is None else match_head(logits)[1]
        if logits is not None and head is not None and (own is logits or _is_of(head, own)):
            found = one_pass(call, logits, head)
            return found.logsumexp - found.entropy if of_log is None else -found.entropy
    return None


def _factors(node: Node) -> tuple[float, list[Node]]:
    """Return a number and nodes of which the node is the product; logits are not divided."""
    if isinstance(node, Linear) or node.name not in ("mul", "neg") or match_head(node)[1] is not None:
        return 1.0, [node]
    factor = -1.0 if node.name == "neg" else 1.0
    nodes: list[Node] = []
    for each in node.operands:
        if isinstance(each, (Linear, Apply)):
            own, parts = _factors(each)
            factor, nodes = factor * own, nodes + parts
        elif isinstance(each, (int, float)):
            factor *= each
        else:
            return 1.0, [node]
    return factor, nodes


def _below_softmax(node: Node) -> Node | None:
    """Return the logits of which the node is the softmax; None if it is none."""
    of_exp = below(node, "exp")
    return below(node, "softmax") if of_exp is None else below(of_exp, "log_softmax")


def _is_of(head: LinearHead, node: Node) -> bool:
    """Return whether the node computes the head's logits."""
    own = match_head(node)[1]
    return own is not None and head.is_same(own)
