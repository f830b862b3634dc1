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
from lowtide.core.rowwise.row_function import OfProducts, Rowwise
from lowtide.core.rowwise.variables import Tensors
from lowtide.deferred.recorded import expression
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
    copies: int = 1,
    workspace: int | None,
    as_logits: bool = False,
) -> Tensors:
    """Return the results [...] of a function of the rows, computed chunk by chunk.

    `shape` is the shape of the rows in row_tensors and in the results; the node may arrange the
    rows differently. The function is called as function(logits [C, V], *parts, *others), where
    `parts` are the chunk's rows of row_tensors. The results are differentiable, and nothing of a
    chunk is kept. A half-precision parameter's gradient is summed over the chunks in float32.

    `copies` says how many numbers the function itself holds for each logit, in float32 at least.
    Blocks and chunks of rows fit into `workspace` bytes; None takes the default, which depends on
    the dtype. With `as_logits` it is that of the first product's dtype: then a cast to float32
    changes no block, and all logits come from products of equal shapes.
    """
    node = expression.with_whole_weights(node)
    inputs: list[Tensor] = []
    weights: list[Tensor] = []
    vectors: list[Tensor] = []
    scalars: list[Tensor] = []
    kinds = {"rows": inputs, "weights": weights, "vectors": vectors, "scalars": scalars}
    expression.with_tensors(node, **{kind: _collect_in(tensors) for kind, tensors in kinds.items()})
    # Backward frees the tensors that the graph has saved, but not these functions.
    nothing = torch.empty(0)
    bare = expression.with_tensors(node, **dict.fromkeys(kinds, lambda _: nothing))
    count, after_vectors = len(inputs), len(vectors)
    after_scalars = after_vectors + len(scalars)
    N = shape.numel()
    rows = [each.reshape(N, each.shape[-1]) for each in inputs]
    rows += [each.reshape((N, *each.shape[len(shape) :])) for each in row_tensors]

    def products(rows: Tensors, whole: Tensors) -> Tensors:
        tree = expression.with_tensors(bare, rows=_take_from(rows), weights=_take_from(whole))
        return tuple(map(expression.product, expression.linears(tree)))

    def rest(rows: Tensors, whole: Tensors) -> tuple[Tensors, tuple[()]]:
        vectors_V, scalars_1 = _take_from(whole), _take_from(whole[after_vectors:])
        tree = expression.with_tensors(bare, vectors=vectors_V, scalars=scalars_1)
        logits_CV = expression.evaluate(tree, rows[:count])
        return function(logits_CV, *rows[count:], *whole[after_scalars:]), ()

    dtype = expression.linears(node)[0].dtype if as_logits else node.dtype
    block, chunk = _sizes(node, N, copies, dtype, workspace)
    tracked = expression.requires_grad(node) or any(each.requires_grad for each in row_tensors)
    with torch.set_grad_enabled(torch.is_grad_enabled() and tracked):
        of_products = Rowwise(rest, len(rows), results, chunk)
        rowwise = OfProducts(products, count, len(weights), of_products, block)
        outputs = rowwise(*rows, *weights, *vectors, *scalars, *others)
    return tuple(in_shape(each, (*shape, *each.shape[1:])) for each in outputs)


def _collect_in(tensors: list[Tensor]) -> expression.Change:
    def collected(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    return collected


def _take_from(tensors: Tensors) -> expression.Change:
    """Return a function that replaces one tensor after the other by these."""
    each = iter(tensors)
    return lambda _: next(each)


def _sizes(
    node: expression.Node, N: int, copies: int, dtype: torch.dtype, workspace: int | None
) -> tuple[int, int]:
    """Return the rows of a block, whose products are held, and those of a chunk, in this workspace.

    A block has its products and their gradients, a chunk the results of all other operations. The
    default takes no more than logits of `dtype` would in forward and backward, but at least ROOM,
    since chunks need enough rows. A block has half of it, whatever the other operations are, unless
    one row of these takes more than half.
    """
    linears, wide = expression.linears(node), max(node.dtype.itemsize, 4)
    V, device = linears[0].weight.tensor.shape[0], counted_as(linears[0].input.tensor.device.type)
    products = sum(each.dtype.itemsize for each in linears)
    applied = sum(each.dtype.itemsize for each in expression.every(node)) - products
    # Of a logit, a block has its products and their gradients. A chunk has one operation's gradient
    # at a time, beside the results.
    of_block, of_chunk = V * 2 * products, V * (applied + (copies + 1) * wide)
    default = min(DEFAULT_WORKSPACE[device], max(ROOM[device], 3 * N * V * dtype.itemsize))
    held = default if workspace is None else workspace
    if workspace is not None and workspace < of_chunk + of_block:
        name = f"one row of {V} logits, and what their operations and the loss hold of it"
        raise too_small(workspace, of_chunk + of_block, name)
    block = max(1, min(N, (held - max(held // 2, of_chunk)) // of_block))
    return block, max(1, (held - block * of_block) // of_chunk)


def evaluate(node: expression.Node, workspace: int | None) -> Tensor:
    """Return all logits, with the bits that functions of the rows have found `as_logits`."""
    shape = expression.hidden(node).shape[:-1]
    (logits,) = by_rows(node, shape, 1, lambda z_CV: (z_CV,), workspace=workspace, as_logits=True)
    return logits
