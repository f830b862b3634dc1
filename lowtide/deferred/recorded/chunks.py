"""Evaluate functions of the rows of deferred logits, one chunk of rows at a time.

A chunk's logits come from the recorded operations. These functions are for the cases where the
fused operators do not apply.

Shapes: [...] are the rows, N of them; V classes; C rows of a chunk, K numbers picked from each.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lowtide.core.autodiff import in_shape
from lowtide.core.kernels.devices import counted_as
from lowtide.core.row_function import Rowwise, Tensors
from lowtide.deferred.recorded import expression
from lowtide.ops.linear_cross_entropy.operator.higher_order import COPIES
from lowtide.ops.linear_cross_entropy.planning.division.sizes import too_small
from lowtide.ops.linear_cross_entropy.planning.division.workspace import DEFAULT_WORKSPACE, ROOM

RowFunction = Callable[..., Tensors]


def by_rows(
    node: expression.Node,
    shape: torch.Size,
    results: int,
    function: RowFunction,
    *row_tensors: Tensor,
    others: Tensors = (),
    workspace: int | None,
    as_logits: bool = False,
) -> Tensors:
    """Return the results [...] of a function of the rows, computed chunk by chunk.

    `shape` is the shape of the rows in row_tensors and in the results; the node may arrange the
    rows differently. The function is called as function(logits [C, V], *parts, *others), where
    `parts` are the chunk's rows of row_tensors. The results are differentiable, and nothing of a
    chunk is kept. A half-precision parameter's gradient is summed over the chunks in float32.

    A chunk has as many rows as fit into `workspace` bytes; None takes the default, which depends on
    the dtype. With `as_logits` it is that of the first product's dtype: then a cast to float32
    changes no chunk, and all logits come from products of equal shapes.
    """
    node = expression.with_whole_weights(node)
    inputs: list[Tensor] = []
    classes: list[Tensor] = []
    scalars: list[Tensor] = []
    collect = (lambda tensor, into=into: into.append(tensor) or tensor for into in (inputs, classes, scalars))
    expression.with_tensors(node, *collect)
    product = next(expression.linears(node))
    N, V = shape.numel(), product.weight.tensor.shape[0]
    rows = [each.reshape(N, each.shape[-1]) for each in inputs]
    rows += [each.reshape((N, *each.shape[len(shape) :])) for each in row_tensors]

    def chunk(rows: Tensors, whole: Tensors) -> tuple[Tensors, tuple[()]]:
        parts = (iter(rows), iter(whole[: len(classes)]), iter(whole[len(classes) :]))
        take = (lambda _, part=part: next(part) for part in parts)
        logits_CV = expression.evaluate(expression.with_tensors(node, *take))
        return function(logits_CV, *rows[len(inputs) :], *whole[len(classes) + len(scalars) :]), ()

    row_bytes = COPIES * V * max(node.dtype.itemsize, 4)
    if workspace is not None and workspace < row_bytes:
        raise too_small(
            workspace, row_bytes, f"one row of {V} logits, {COPIES} times over in a loss by chunks"
        )
    device = counted_as(rows[0].device.type)
    # Take no more than real logits would in forward and backward, but at least ROOM: chunks need
    # enough rows.
    dtype = product.dtype if as_logits else node.dtype
    default = min(DEFAULT_WORKSPACE[device], max(ROOM[device], 3 * N * V * dtype.itemsize))
    chunk_size = max(1, (default if workspace is None else workspace) // row_bytes)
    tracked = expression.requires_grad(node) or any(each.requires_grad for each in row_tensors)
    with torch.set_grad_enabled(torch.is_grad_enabled() and tracked):
        outputs = Rowwise(chunk, len(rows), results, chunk_size)(*rows, *classes, *scalars, *others)
    return tuple(in_shape(each, (*shape, *each.shape[1:])) for each in outputs)


def evaluate(node: expression.Node, workspace: int | None) -> Tensor:
    """Return all logits, with the bits that functions of the rows have found `as_logits`."""
    shape = expression.hidden(node).shape[:-1]
    (logits,) = by_rows(node, shape, 1, lambda z_CV: (z_CV,), workspace=workspace, as_logits=True)
    return logits
