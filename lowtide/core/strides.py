"""Tell how operands lie in memory and what can read them without a copy.

Shapes: N tokens, D features, V classes.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

VECTOR = 8  # elements; 16 bytes in half precision


def maps_input(input: Tensor, copies_rows: bool, at: Callable[[Tensor], int]) -> bool:
    """Return True if a tensor map can read the rows of [..., D].

    If rows are copied, the copies are aligned. `at` returns where a tensor begins.
    """
    rows = input.dim() <= 3 or flattens(input)
    return rows and input.stride(-1) == 1 and (copies_rows or _is_aligned(input, at))


def maps_weight(weight_VD: Tensor, dtype: torch.dtype, at: Callable[[Tensor], int]) -> bool:
    """Return True if a tensor map can read the weight, or a copy of it in another dtype."""
    if weight_VD.dtype != dtype:
        return weight_VD.stride(-1) == 1
    return lies_by_rows(weight_VD) and _is_aligned(weight_VD, at)


def place(tensor: Tensor) -> int:
    """Return where a tensor begins, in elements, for the choice of the engine.

    While torch.compile traces, this is 0, which is aligned, because a graph does not guard storage
    offsets. When the graph runs, `readable` in the loss's operator/planner.py copies operands
    that are not aligned.
    """
    return 0 if torch.compiler.is_compiling() else tensor.storage_offset()


def address(tensor: Tensor) -> int:
    """Return where a tensor begins, in elements, when the engine runs."""
    return tensor.data_ptr() // tensor.element_size()


def lies_by_rows(matrix: Tensor) -> bool:
    """Return True if each row is contiguous and rows do not overlap."""
    outer, inner = matrix.stride()
    return inner == 1 and outer >= matrix.shape[1]


def lies_by_columns(matrix: Tensor) -> bool:
    """Return True if a matrix is the transpose of a contiguous one, but not contiguous."""
    return not matrix.is_contiguous() and matrix.t().is_contiguous()


def multiplies(matrix: Tensor) -> bool:
    """Return True if a GEMM reads the matrix without a copy, by rows or by columns."""
    return lies_by_rows(matrix) or lies_by_rows(matrix.t())


def copies_rows(input: Tensor, dtype: torch.dtype) -> bool:
    """Return True if the rows of a chunk are copied, because of their dtype or their strides."""
    if input.dtype != dtype or not flattens(input):
        return True
    # Compute the strides of the view [N, D]: a fake tensor of another mode could not make the view.
    N, D, inner = math.prod(input.shape[:-1]), input.shape[-1], input.stride(-1)
    rows = _leading(input)
    outer = rows[-1][1] if rows else D
    return not ((inner == 1 and outer >= D) or (outer == 1 and inner >= N))


def _is_aligned(tensor: Tensor, at: Callable[[Tensor], int]) -> bool:
    """Return True if each row begins at a multiple of 8 elements, which is at least 16 bytes."""
    return all(stride % VECTOR == 0 for stride in (*tensor.stride()[:-1], at(tensor)))


def layouts_of(tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """Return how each tensor lies: shape, strides, dtype and device; None for no tensor."""
    return tuple(
        [None if each is None else (each.shape, each.stride(), each.dtype, each.device) for each in tensors]
    )


def needs_aligned_copy(operand: Tensor, dtype: torch.dtype, *, of_input: bool = False) -> bool:
    """Return True if GEMMs on CUDA read an operand slowly in this dtype.

    In half precision they read it fast if its features are whole vectors of 16 bytes, and each row
    (each column, if it lies by columns) begins at a multiple of one. A graph guards neither strides
    nor where a tensor begins, so while one is traced only the features count. An operand of another
    dtype is cast, by rows.

    An input by columns counts as slow, since tensor maps read it only by rows.
    """
    if dtype.itemsize != 2 or operand.shape[-1] % VECTOR:
        return dtype.itemsize == 2
    if operand.dtype != dtype or torch.compiler.is_compiling():
        return False
    if of_input and operand.stride(-1) != 1:
        return True
    begins = [stride for size, stride in zip(operand.shape, operand.stride()) if size > 1 and stride != 1]
    return any(each % VECTOR for each in (*begins, place(operand)))


def aligned(operand: Tensor, dtype: torch.dtype, *, of_input: bool = False) -> Tensor:
    """Return the operand, or a copy by rows of one that GEMMs on CUDA read slowly.

    Zeros follow features that are no multiple of 8. Autograd follows the copy.
    """
    if not needs_aligned_copy(operand, dtype, of_input=of_input):
        return operand
    if operand.shape[-1] % VECTOR:
        return F.pad(operand, (0, -operand.shape[-1] % VECTOR))
    return operand.clone(memory_format=torch.contiguous_format)


def flattens(tensor: Tensor, dims: int = -1) -> bool:
    """Return True if the dimensions before `dims` can be viewed as one: [..., D] as [N, D]."""
    rows = _leading(tensor, dims)
    return all(rows[i][1] == rows[i + 1][0] * rows[i + 1][1] for i in range(len(rows) - 1))


def _leading(tensor: Tensor, dims: int = -1) -> list[tuple[int, int]]:
    """Return size and stride of each leading dimension whose size is not 1."""
    return [each for each in zip(tensor.shape[:dims], tensor.stride()) if each[0] != 1]


def gathered_rows(tensor: Tensor, leading: Sequence[int], place: Tensor) -> Tensor:
    """Return a copy of the rows at these places, counted through all leading dimensions."""
    places = []  # one index per dimension; torch.unravel_index would wait for the device
    for size in reversed(leading):
        places.append(place % size)
        place = place // size
    return tensor[tuple(reversed(places))]
