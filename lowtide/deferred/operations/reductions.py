"""Compute argmax, sums and means over the classes of deferred logits.

Entropies are by the fused operator. All else is a chunk of rows at a time.

Shapes: [...] are the rows, V classes; C rows of a chunk.
"""

import math
from typing import Any

import torch
from torch import Tensor

from lowtide.core.autodiff import in_shape
from lowtide.deferred.operations.log_probs import one_pass
from lowtide.deferred.operations.row_values import by_rows, class_dim, counted, of_classes
from lowtide.deferred.proxies.handlers import handles
from lowtide.deferred.proxies.logits import DeferredLogits
from lowtide.deferred.recorded.expression import Apply, Linear, Node
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
    """Return the sum or mean of c p log p, or of c p z, over the classes; None of anything else.

    p is the softmax of the logits z, c a number, and H the entropy of p:

        sum p log p = -H        sum p z = logsumexp(z) - H

    The second is as far off as the logsumexp, from which people subtract it to find H.
    """
    if class_dim(input, dim) is None or torch.compiler.is_compiling():
        return None
    node = input.checked()
    factor, factors = _factors(node)
    if len(factors) != 2:
        return None
    for probabilities, other in (factors, factors[::-1]):
        head = _head_of_softmax(probabilities)
        is_log = isinstance(other, Apply) and other.name == "log_softmax"
        own = None if head is None else match_head(other.first if is_log else other)[1]  # type: ignore[union-attr]
        if head is None or own is None or not head.is_same(own):
            continue
        found = one_pass(input.head_call, head)
        total = -found.entropy if is_log else found.logsumexp - found.entropy
        share = input.classes if name == "mean" else 1
        return in_shape(total * (factor / share), input.rows).to(options.get("dtype", node.dtype))
    return None


def _factors(node: Node) -> tuple[float, list[Node]]:
    """Return a number and nodes of which the node is the product."""
    if isinstance(node, Linear) or node.name not in ("mul", "neg"):
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


def _head_of_softmax(node: Node) -> LinearHead | None:
    """Return the head of whose logits the node is the softmax; None if it is none."""
    if isinstance(node, Linear):
        return None
    if node.name == "softmax":
        return match_head(node.first)[1]
    below = node.first
    is_exp = node.name == "exp" and isinstance(below, Apply) and below.name == "log_softmax"
    return match_head(below.first)[1] if is_exp else None  # type: ignore[union-attr]
