"""The operands of the products: chunks of tokens and blocks of classes, as views where those will do.

Shapes: N tokens, D features, V classes; C tokens of a chunk, B classes of a block.
"""

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from lowtide.core.strides import lies_by_rows, multiplies

# Of one product that becomes dX. cuBLAS cuts what is higher less well: 5120 rows of 4096 features, summed
# over 128k classes, take 2 % of a step longer at once (decision 0032).
PRODUCT_ROWS = 2048

# On the CPU rows are gathered and converted so many bytes at a time, or one by one: there are no two copies
# of a chunk.
GATHERED_BYTES = 1 << 13


@contextlib.contextmanager
def on_device_of(tensor: Tensor) -> Iterator[None]:
    """Triton launches on the current device, whatever the tensors'; and autocast has had its say."""
    with torch.cuda.device_of(tensor), torch.autocast(tensor.device.type, enabled=False):
        yield


def blocks(size: int, step: int) -> Iterator[slice]:
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))


class Operand:
    """One linear term: an input [..., D] by rows, a weight [V, D] by classes."""

    def __init__(
        self,
        input: Tensor,
        weight_VD: Tensor,
        dtype: torch.dtype,
        copies_rows: bool,
        counted: Tensor | None,
    ) -> None:
        self.input, self.leading = _flat_view(input), input.shape[:-1]
        self.dtype, self.copies_rows, self.counted = dtype, copies_rows, counted
        self.D, self.weight_dtype = input.shape[-1], weight_VD.dtype
        # On CUDA a weight of another dtype is cast as a whole and once, which is what autocast does with it.
        cast = weight_VD.is_cuda and weight_VD.dtype != dtype
        self.weight_VD = weight_VD.to(dtype) if cast else weight_VD

    def rows(self, rows: slice) -> Tensor:
        """Tokens as [C, D] in the operands' dtype; a copy, of these rows alone, where a view will not do."""
        x_CD = None
        if self.input.dim() == 2 and self.counted is None:
            x_CD = self.input[rows]
            if not self.copies_rows or (x_CD.dtype == self.dtype and lies_by_rows(x_CD)):
                return x_CD
        elif self.input.dtype == self.dtype:
            gathered_CD = self._gathered(rows)
            return gathered_CD if lies_by_rows(gathered_CD) else gathered_CD.contiguous()
        C, row = rows.stop - rows.start, self.D * self.input.element_size()
        copy_CD = torch.empty(C, self.D, dtype=self.dtype, device=self.input.device)
        for part in blocks(C, C if self.input.is_cuda else max(1, GATHERED_BYTES // max(1, row))):
            own = slice(rows.start + part.start, rows.start + part.stop)
            copy_CD[part] = self._gathered(own) if x_CD is None else x_CD[part]
        return copy_CD

    def _gathered(self, rows: slice) -> Tensor:
        """Tokens that no slice of a matrix has: those that count, or those of a slice of a wider tensor."""
        if self.input.dim() == 2:
            assert self.counted is not None
            return self.input[self.counted[rows]]
        place_C = torch.arange(rows.start, rows.stop, device=self.input.device)
        if self.counted is not None:
            place_C = self.counted[rows]
        places = []  # one index a dimension; torch.unravel_index would wait for the device
        for size in reversed(self.leading):
            places.append(place_C % size)
            place_C = place_C // size
        return self.input[tuple(reversed(places))]

    def weight(self, classes: slice) -> Tensor:
        weight_BD = self.weight_VD[classes]
        if weight_BD.dtype == self.dtype and multiplies(weight_BD):
            return weight_BD
        # A product would copy what it cannot read, every time.
        return torch.empty_like(weight_BD, dtype=self.dtype).copy_(weight_BD)

    def weights(self, step: int) -> Iterator[tuple[slice, Tensor]]:
        """All classes, a block at a time. Copies take turns in one buffer: the CPU's allocator would give
        each back to the system, and getting its pages again takes longer than the copy."""
        buffer = None
        for classes in blocks(self.weight_VD.shape[0], step):
            weight_BD = self.weight_VD[classes]
            if weight_BD.dtype != self.dtype or not multiplies(weight_BD):
                buffer = torch.empty_like(weight_BD, dtype=self.dtype) if buffer is None else buffer
                weight_BD = buffer[: weight_BD.shape[0]].copy_(weight_BD)
            yield classes, weight_BD


def copied_bytes(input: Tensor, dtype: torch.dtype) -> tuple[int, int]:
    """Return what `Operand.rows` holds where it copies: bytes of each row, and bytes in any case."""
    D, row = input.shape[-1], input.shape[-1] * input.element_size()
    if input.dtype == dtype:
        return row, 0
    if input.is_cuda:
        return D * dtype.itemsize + row, 0
    return D * dtype.itemsize, max(row, GATHERED_BYTES)


def product(out: Tensor, a: Tensor, b: Tensor, *, add: bool = False) -> None:
    """out (+)= a b, summed in out's dtype, whatever that of the operands."""
    if a.shape[1] == 0:  # where cuBLAS leaves what it finds
        if not add:
            out.zero_()
        return
    widen = {} if out.dtype == a.dtype else {"out_dtype": out.dtype}
    if add:
        torch.addmm(out, a, b, out=out, **widen)
    else:
        torch.mm(a, b, out=out, **widen)


def product_of_rows(out: Tensor, a: Tensor, b: Tensor, *, add: bool = False) -> None:
    """The same, some rows at a time."""
    for rows in blocks(a.shape[0], PRODUCT_ROWS):
        product(out[rows], a[rows], b, add=add)


def sum_of_products(vectors: Tensor, matrix: Tensor) -> Tensor:
    """vectors [K, R] matrix [R, S], exact to float32: the vectors are float32, cut into three numbers of the
    matrix's dtype that add up to them."""
    if matrix.dtype == vectors.dtype:
        return vectors @ matrix
    K, rest, parts = vectors.shape[0], vectors, []
    for _ in range(3):
        parts.append(rest.to(matrix.dtype))
        rest = rest - parts[-1].to(vectors.dtype)
    # Rows of zeros fill up what a tensor core takes at a time.
    parts.append(torch.zeros(-3 * K % 8, vectors.shape[1], dtype=matrix.dtype, device=matrix.device))
    sums = torch.mm(torch.cat(parts), matrix, out_dtype=vectors.dtype)
    return sums[: 3 * K].view(3, K, -1).sum(0)


def _flat_view(input: Tensor) -> Tensor:
    """[N, D] where that is a view of [..., D]; else the input as it is."""
    try:
        return input.view(math.prod(input.shape[:-1]), input.shape[-1])
    except RuntimeError:
        return input
