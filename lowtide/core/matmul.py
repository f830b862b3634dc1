"""Read operands by chunks of tokens and blocks of classes, and multiply them.

Shapes: N tokens, D features, V classes; C tokens of a chunk, B classes of a block.
"""

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from lowtide.core.bfloat16_units import gemm
from lowtide.core.kernels.backend import PRODUCT_ROWS
from lowtide.core.strides import gathered_rows, lies_by_rows, multiplies

# cuBLAS takes 1.6 to 7 times as long if a contiguous dimension is no multiple of 16 bytes, even if
# each row begins at a multiple. So a large GEMM is made of two: whole vectors first, then the rest
# (decision 0053).
VECTOR_BYTES, FEWEST_MULTIPLICATIONS = 16, 1 << 30

# On the CPU rows are gathered and converted in parts of this many bytes (at least one row), so that
# no second copy of a chunk exists.
GATHERED_BYTES = 1 << 13


_UNCHANGED = contextlib.nullcontext()


def on_device_of(tensor: Tensor) -> contextlib.AbstractContextManager[None]:
    """Make the tensor's device current and switch autocast off.

    Triton launches on the current device, wherever its tensors are. Autocast has been applied to
    the operands already.
    """
    device = tensor.device
    if torch.is_autocast_enabled(device.type):
        return _without_autocast(tensor)
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _UNCHANGED  # to ask takes less time than to change it
    return torch.cuda.device_of(tensor)


@contextlib.contextmanager
def _without_autocast(tensor: Tensor) -> Iterator[None]:
    with torch.cuda.device_of(tensor), torch.autocast(tensor.device.type, enabled=False):
        yield


def blocks(size: int, step: int, *, first: int = 0) -> Iterator[slice]:
    """Yield the slices of at most `step` that make up range(first, size)."""
    for start in range(first, size, step):
        yield slice(start, min(start + step, size))


def rows_of(tensor: Tensor, rows: slice) -> Tensor:
    """Return these rows of a tensor, or the tensor itself for all rows, as a view takes 2 us."""
    return tensor if rows.start == 0 and rows.stop == tensor.shape[0] else tensor[rows]


class Operand:
    """Hold one linear term: an input [..., D] read by rows, a weight [V, D] read by classes."""

    def __init__(
        self,
        input: Tensor,
        weight_VD: Tensor,
        dtype: torch.dtype,
        copies_rows: bool,
        kept_rows: Tensor | None,
    ) -> None:
        self.input, self.leading = _flat_view(input), input.shape[:-1]
        self.dtype, self.copies_rows, self.kept_rows = dtype, copies_rows, kept_rows
        self.D = input.shape[-1]
        # On CUDA a weight of another dtype is cast as a whole, once, as autocast does.
        cast = weight_VD.is_cuda and weight_VD.dtype != dtype
        by_rows = torch.contiguous_format
        self.weight_VD = weight_VD.to(dtype, memory_format=by_rows) if cast else weight_VD

    def rows(self, rows: slice) -> Tensor:
        """Return these tokens as [C, D] in the operands' dtype: a view, or a copy of these rows."""
        x_CD = None
        if self.input.dim() == 2 and self.kept_rows is None:
            x_CD = rows_of(self.input, rows)
            if not self.copies_rows or (x_CD.dtype == self.dtype and lies_by_rows(x_CD)):
                return x_CD
        elif self.input.dtype == self.dtype:
            gathered_CD = self._gathered(rows)
            return gathered_CD if lies_by_rows(gathered_CD) else gathered_CD.contiguous()
        C, row = rows.stop - rows.start, self.D * self.input.element_size()
        copy_CD = torch.empty(C, self.D, dtype=self.dtype, device=self.input.device)
        on_cpu = self.input.device.type == "cpu"
        for part in blocks(C, max(1, GATHERED_BYTES // max(1, row)) if on_cpu else C):
            own = slice(rows.start + part.start, rows.start + part.stop)
            copy_CD[part] = self._gathered(own) if x_CD is None else x_CD[part]
        return copy_CD

    def _gathered(self, rows: slice) -> Tensor:
        """Return tokens that are not a slice of a matrix: kept rows, or rows of [..., D]."""
        if self.input.dim() == 2:
            assert self.kept_rows is not None
            return self.input[self.kept_rows[rows]]
        if self.kept_rows is None:
            place_C = torch.arange(rows.start, rows.stop, device=self.input.device)
        else:
            place_C = self.kept_rows[rows]
        return gathered_rows(self.input, self.leading, place_C)

    def weight(self, classes: slice) -> Tensor:
        """Return the weight of these classes in a dtype and layout that a GEMM reads."""
        weight_BD = rows_of(self.weight_VD, classes)
        if weight_BD.dtype == self.dtype and multiplies(weight_BD):
            return weight_BD
        # Copy once: each GEMM would copy a layout that it cannot read.
        return torch.empty_like(weight_BD, dtype=self.dtype).copy_(weight_BD)

    def weights(self, step: int, part: slice | None = None) -> Iterator[tuple[slice, Tensor]]:
        """Yield all classes, or those of a part, a block at a time, with their weights.

        Copies reuse one buffer. The CPU's allocator would return each copy to the system, and
        getting its pages again takes longer than the copy itself.
        """
        buffer = None
        first, last = (0, self.weight_VD.shape[0]) if part is None else (part.start, part.stop)
        for block in blocks(last - first, step):
            classes = slice(first + block.start, first + block.stop)
            weight_BD = self.weight_VD[classes]
            if weight_BD.dtype != self.dtype or not multiplies(weight_BD):
                buffer = torch.empty_like(weight_BD, dtype=self.dtype) if buffer is None else buffer
                weight_BD = buffer[: weight_BD.shape[0]].copy_(weight_BD)
            yield classes, weight_BD


def copied_bytes(input: Tensor, dtype: torch.dtype) -> tuple[int, int]:
    """Return what the copies of `Operand.rows` take: bytes per row, and a fixed number of bytes."""
    D, row = input.shape[-1], input.shape[-1] * input.element_size()
    if input.dtype == dtype:
        return row, 0
    if input.device.type == "cpu":
        return D * dtype.itemsize, max(row, GATHERED_BYTES)
    return D * dtype.itemsize + row, 0


def product(out: Tensor, a: Tensor, b: Tensor, *, add: bool = False, scale: float = 1.0) -> None:
    """Write scale a b to out, or add it to out; sums have out's dtype, not the operands'.

    If out is half precision, sums are float32 and are rounded once, after scaling. On a CPU,
    half-precision operands of a float32 result are bfloat16, and the CPU has units for them.
    """
    (M, K), N = a.shape, b.shape[1]
    if K == 0:  # where cuBLAS does not write to `out`
        if not add:
            out.zero_()
        return
    if a.dtype != out.dtype and not a.is_cuda:
        assert scale == 1, "on a CPU only sums in the operands' dtype are scaled"
        if out.numel() == 0:
            return
        if lies_by_rows(a):
            gemm.multiply(out, a, b, add=add)
        else:
            gemm.multiply_transposed(out, a.t(), b, add=add)
        return
    cut = (M | N | K) % VECTOR_BYTES != 0 and a.is_cuda and M * N * K >= FEWEST_MULTIPLICATIONS
    if cut and (parts := whole_vectors(out, a, b)):
        for rows, columns, inner in parts:
            part = out[rows, columns], a[rows, inner], b[inner, columns]
            product(*part, add=add or inner.start > 0, scale=scale)
        return
    widen = {} if out.dtype == a.dtype else {"out_dtype": out.dtype}
    if add or scale != 1:
        torch.addmm(out, a, b, beta=int(add), alpha=scale, out=out, **widen)
    else:
        torch.mm(a, b, out=out, **widen)


def whole_vectors(out: Tensor, a: Tensor, b: Tensor) -> list[tuple[slice, ...]]:
    """Return a GEMM in two parts, the first of whole vectors, each as (rows, columns, inner).

    Return an empty list if each contiguous dimension has whole vectors, if rows are not aligned
    anyway, or if the inner dimension would be cut and the sum rounded between the two parts.
    """
    if a.dtype.itemsize != 2 or not all(_rows_are_aligned(each) for each in (out, a, b)):
        return []
    sizes = (*out.shape, a.shape[1])
    side_by_side = (
        a.stride(0) == 1 or out.stride(0) == 1,
        b.stride(1) == 1 or out.stride(1) == 1,
        (a.stride(1) == 1 or b.stride(0) == 1) and out.dtype != a.dtype,
    )
    for place, size in enumerate(sizes):
        whole = size - size % (VECTOR_BYTES // a.dtype.itemsize)
        if side_by_side[place] and 0 < whole < size:
            every = [slice(0, each) for each in sizes]
            cut = slice(0, whole), slice(whole, size)
            return [(*every[:place], part, *every[place + 1 :]) for part in cut]
    return []


def _rows_are_aligned(matrix: Tensor) -> bool:
    """Return True if each row (column, if transposed) begins at a multiple of a vector."""
    longer = max(matrix.stride())
    return longer * matrix.element_size() % VECTOR_BYTES == 0 and matrix.data_ptr() % VECTOR_BYTES == 0


def product_of_rows(out: Tensor, a: Tensor, b: Tensor, *, add: bool = False) -> None:
    """Write a b to out, or add it, PRODUCT_ROWS rows at a time."""
    for rows in blocks(a.shape[0], PRODUCT_ROWS):
        product(rows_of(out, rows), rows_of(a, rows), b, add=add)


def in_three_parts(vectors: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Return three half-precision tensors whose sum is a float32 one, for GEMMs that read these."""
    rest, parts = vectors, [vectors.to(dtype)]
    for _ in range(2):
        rest = rest - parts[-1].to(vectors.dtype)
        parts.append(rest.to(dtype))
    return parts


def sum_of_products(vectors: Tensor, matrix: Tensor) -> Tensor:
    """Return the product of vectors [K, R] and a matrix [R, S], exact to float32, on a CUDA device.

    If the matrix is half precision, each float32 vector is written as a sum of three vectors of the
    matrix's dtype.
    """
    if matrix.dtype == vectors.dtype:
        return vectors @ matrix
    K, parts = vectors.shape[0], in_three_parts(vectors, matrix.dtype)
    # Tensor cores take a multiple of 8 rows; zeros fill the last ones.
    parts.append(torch.zeros(-3 * K % 8, vectors.shape[1], dtype=matrix.dtype, device=matrix.device))
    sums = torch.mm(torch.cat(parts), matrix, out_dtype=vectors.dtype)
    return sums[: 3 * K].view(3, K, -1).sum(0)


def _flat_view(input: Tensor) -> Tensor:
    """Return the input as a view [N, D] if there is one, else unchanged."""
    try:
        return input.view(math.prod(input.shape[:-1]), input.shape[-1])
    except RuntimeError:
        return input
