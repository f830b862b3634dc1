"""How operands lie in memory, and who can read them so.

Shapes: N tokens, D features, V classes.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor


def maps_input(input: Tensor, copies_rows: bool, at: Callable[[Tensor], int]) -> bool:
    """Return whether a tensor map can read the rows of [..., D], or those of a chunk are copied, and so
    aligned. `at` says where a tensor begins."""
    rows = input.dim() <= 3 or _flattens(input)
    return rows and input.stride(-1) == 1 and (copies_rows or _is_aligned(input, at))


def maps_weight(weight_VD: Tensor, dtype: torch.dtype, at: Callable[[Tensor], int]) -> bool:
    """Return whether a tensor map can read the weight, or it is copied as a whole, for its dtype."""
    if weight_VD.dtype != dtype:
        return weight_VD.stride(-1) == 1
    return lies_by_rows(weight_VD) and _is_aligned(weight_VD, at)


def place(tensor: Tensor) -> int:
    """Return where a tensor begins, in numbers, while the engine is chosen. A graph does not guard that:
    there any place will do, and route.readable copies what begins at another."""
    return 0 if torch.compiler.is_compiling() else tensor.storage_offset()


def address(tensor: Tensor) -> int:
    """Return where a tensor begins, in numbers, as the engine runs."""
    return tensor.data_ptr() // tensor.element_size()


def lies_by_rows(matrix: Tensor) -> bool:
    """Return whether the numbers of a row lie side by side, and rows do not overlap."""
    outer, inner = matrix.stride()
    return inner == 1 and outer >= matrix.shape[1]


def multiplies(matrix: Tensor) -> bool:
    """Return whether a product reads the matrix as it is, by rows or by columns; it would copy any other."""
    return lies_by_rows(matrix) or lies_by_rows(matrix.t())


def copies_rows(input: Tensor, dtype: torch.dtype) -> bool:
    """Return whether a chunk's rows are copied, for their dtype or their strides."""
    if input.dtype != dtype or not _flattens(input):
        return True
    return not multiplies(input.view(math.prod(input.shape[:-1]), input.shape[-1]))


def _is_aligned(tensor: Tensor, at: Callable[[Tensor], int]) -> bool:
    """Return whether each row begins at a multiple of 8 numbers, of 16 bytes at the least."""
    return all(stride % 8 == 0 for stride in (*tensor.stride()[:-1], at(tensor)))


def _flattens(input: Tensor) -> bool:
    """Return whether [..., D] can be seen as [N, D] without a copy."""
    size, stride = input.shape[:-1], input.stride()[:-1]
    return all(
        size[i] == 1 or size[i + 1] == 1 or stride[i] == size[i + 1] * stride[i + 1]
        for i in range(len(size) - 1)
    )
