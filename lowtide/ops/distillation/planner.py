"""Decide from shapes, dtypes and the device which pass runs and how the workspace is divided.

    fixed       vectors of N and V numbers, and the temporaries of one tile of the pass in torch
    per row     the logits of both heads, copies of their features, and the gradient of the
                student's features

All other parts are those of linear_cross_entropy/planning/byte_counts.py.

There are three ways to form the gradient of a half-precision weight; the first that fits is taken.
For few rows a single product over all rows forms it. Until then the logits of each chunk lie in the
gradient's memory, and the gradient of the student's logits is kept for all rows. If that memory is
too small for all rows, on CUDA they are one chunk with logits of its own where there is room. The
second way adds up the products of the chunks in a float32 sum. The third forms the gradient
class block by class block, which takes two more products.

Shapes: N rows, D features, V classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lowtide.core.errors import ArgumentError
from lowtide.core.kernels.backend import PRODUCT_ROWS
from lowtide.core.kernels.devices import counted_as
from lowtide.core.matmul import copied_bytes
from lowtide.core.strides import multiplies
from lowtide.ops.distillation.heads import DistillationOptions, Heads, copies_input
from lowtide.ops.linear_cross_entropy.planning.byte_counts import ByteCounts, padded
from lowtide.ops.linear_cross_entropy.planning.call_memory import may_depend_on_tokens
from lowtide.ops.linear_cross_entropy.planning.division.sizes import choose_sizes
from lowtide.ops.linear_cross_entropy.planning.division.workspace import granted_bytes, with_logits_placed
from lowtide.ops.linear_cross_entropy.planning.memory_model import with_shard
from lowtide.ops.linear_cross_entropy.planning.requirements import choose_backend
from lowtide.ops.linear_cross_entropy.planning.tiling import Tiling
from lowtide.ops.linear_cross_entropy.planning.weight_gradient import choose_weight_gradient
from lowtide.ops.linear_cross_entropy.ranks.agreement import Agreement

# Bytes of a head's logits that the pass in torch takes at a time: as many as fit in a CPU's cache,
# or as keep a GPU busy. The pass holds TEMPORARIES tensors of that size at once.
TILE_BYTES = {"cpu": 1 << 18, "cuda": 1 << 26}
TEMPORARIES = 8

# A single product forms the weight gradient only if the gradient's memory has room for both heads'
# logits of this many rows, or of half of all rows. With fewer rows per chunk, a product would read
# a whole weight for less than about one tile of tensor cores.
FEWEST_ROWS = 120

# Rows of logits begin at multiples of this many numbers, since unaligned products are slow.
ALIGNMENT = 16  # decision 0034


@dataclass(frozen=True, kw_only=True)
class DistillationPlan(Tiling):
    """Hold every decision about one call; its weight gradient is never "packed"."""

    options: DistillationOptions
    needs_grad: Sequence[bool]
    """True for each of the student's tensors that gets a gradient."""
    backend: str
    """Backend of the pass: "triton" or "torch"."""
    pass_logits: int
    """Number of logits of each head that the pass in torch takes at a time."""
    agreement: Agreement | None = None
    """Holds what the ranks agreed on, if the heads are divided over them."""
    differ: Tensor | None = None
    """True, on the device, if a tensor that must be equal on all ranks is not."""

    @property
    def engine(self) -> str:
        return "distillation"

    @property
    def sum_dtype(self) -> torch.dtype:
        return self.options.sum_dtype


def make_plan(heads: Heads, options: DistillationOptions, needs_grad: Sequence[bool]) -> DistillationPlan:
    _check_products(heads, options)
    workspace, counts, backend, pass_logits = _memory(heads, options, needs_grad)
    tiling = vars(choose_sizes(workspace, counts))
    return DistillationPlan(
        options=options, needs_grad=needs_grad, backend=backend, pass_logits=pass_logits, **tiling
    )


def _check_products(heads: Heads, options: DistillationOptions) -> None:
    """Raise if the device, on which the call was not compiled, lacks its products."""
    if torch.float16 in (options.student_dtype, options.teacher_dtype) and heads.device.type == "cpu":
        raise ArgumentError(
            "this call was compiled or exported for float16 products, which a CPU lacks; "
            "compile or export it here"
        )


def rows_for(heads: Heads, options: DistillationOptions, needs_grad: Sequence[bool], rank_tokens: int) -> int:
    """Return the rows per chunk that this rank would take if each rank had `rank_tokens` rows."""
    workspace, counts, *_ = _memory(heads, options, needs_grad, rank_tokens)
    return choose_sizes(workspace, counts).rows


def keeps_sum(heads: Heads, options: DistillationOptions, needs_grad: Sequence[bool]) -> bool:
    """Return True if the weight's gradient is kept in the sum's dtype until backward."""
    workspace, counts, *_ = _memory(heads, options, needs_grad)
    return choose_weight_gradient(workspace, counts) == "accumulate"


def _memory(
    heads: Heads, options: DistillationOptions, needs_grad: Sequence[bool], rank_tokens: int | None = None
) -> tuple[int, ByteCounts, str, int]:
    """Return the workspace and each part in bytes, the pass's backend, and `pass_logits`."""
    device, sum_dtype = counted_as(heads.device.type), options.sum_dtype
    V = max(heads.classes, 1)  # if heads are divided, a rank may have no classes
    D, number = heads.student_input.shape[-1], sum_dtype.itemsize
    N = heads.rows if rank_tokens is None else rank_tokens
    if options.tokens_sharded:
        N *= options.ranks
    backend = choose_backend("auto", heads.device, sum_dtype)
    student_dtype, teacher_dtype = options.student_dtype, options.teacher_dtype
    features, gathered = 0, 0
    for input, dtype in ((heads.student_input, student_dtype), (heads.teacher_input, teacher_dtype)):
        of_row, of_part = copied_bytes(input, dtype) if copies_input(input, dtype) else (0, 0)
        of_masked = input.shape[-1] * dtype.itemsize if heads.ignored is not None else 0
        features, gathered = features + of_row + of_masked, max(gathered, of_part)
    biases = sum(each is not None for each in (heads.student_bias, heads.teacher_bias))
    temporaries = TEMPORARIES + 2 * bool(options.group)  # the pass copies both heads' logits there
    tile_row = temporaries * V * number if backend == "torch" else 0
    weight_sum = V * D * number if needs_grad[1] and heads.student_weight.dtype != sum_dtype else 0
    # A class block gives half of its room to its sum. The other half must hold a row of its logits,
    # even if D is small.
    class_sum = max(D, 4) * number
    # A CUDA allocation is a multiple of 512 bytes, and about forty vectors and numbers are smaller.
    small = 32768 if device == "cuda" else 8192
    fixed = 12 * N * number + 3 * biases * V * number + tile_row + gathered + small
    counts = ByteCounts(
        N=N,
        D=D,
        V=V,
        device=device,
        # For reduction "none" only backward wants gradients. Count what its class blocks need in
        # forward too, so that backward does not find the workspace too small.
        fixed=fixed if weight_sum else fixed + 2 * class_sum,
        token_bytes=2 * padded(V, ALIGNMENT) * number + features + D * number,
        weight_sum=weight_sum,
        weight_copy=_copied(heads.student_weight, student_dtype)
        + _copied(heads.teacher_weight, teacher_dtype),
        class_sum=class_sum,
        block_logit=2 * number,
        block_row=2 * ALIGNMENT * number + features,
        product_rows=PRODUCT_ROWS,
        recomputed=2,
    )
    if options.group:
        both = (D, heads.teacher_input.shape[-1])
        counts = with_shard(counts, options.shard, sum_dtype, both, token_bytes=2 * counts.token_bytes)
    elif options.dense is not None and _may_have_one_product(heads, student_dtype, counts):
        rows, size = _rows_in_gradient(heads), student_dtype.itemsize
        in_gradient = padded(V, ALIGNMENT) * size + features + D * size
        counts = replace(
            counts,
            one_product_row=in_gradient if rows >= min(-(-N // 2), FEWEST_ROWS) else 0,
            rows_of_logits=rows,
            sum_row=D * number,
            own_logits_row=(device == "cuda" and rows < N) * (counts.token_bytes + D * size),
        )
        counts = with_logits_placed(counts, options.workspace, options.dense)
    tile_rows = 1
    if tile_row:
        tile_bytes = TILE_BYTES["cpu" if heads.device.type == "cpu" else "cuda"]
        tile_rows = max(1, min(tile_bytes // (V * number), N))
    # One chunk of all rows is granted with a whole tile beside it.
    granted = _with_tile(counts, tile_rows, tile_row) if counts.one_product_row else counts
    workspace = granted_bytes(options.workspace, options.dense, granted)
    if tile_rows > 1:
        if counts.one_product_row and counts.one_chunk <= workspace:
            spare = workspace - counts.one_chunk
        else:  # a quarter of the spare workspace goes to a larger tile, the rest to rows
            spare = max(0, workspace - counts.smallest_workspace) // 4
        tile_rows = min(tile_rows, 1 + spare // tile_row)
    return workspace, _with_tile(counts, tile_rows, tile_row), backend, tile_rows * V


def _with_tile(counts: ByteCounts, rows: int, row: int) -> ByteCounts:
    """Return the counts if a tile of the pass in torch has so many rows, each of `row` bytes."""
    return replace(counts, fixed=counts.fixed + (rows - 1) * row)


def _rows_in_gradient(heads: Heads) -> int:
    """Return the number of rows whose float32 logits, of both heads, fit in a half-precision dW."""
    V, D = heads.student_weight.shape
    return V * D // 2 // (2 * padded(V, ALIGNMENT)) if V else 0


def _may_have_one_product(heads: Heads, dtype: torch.dtype, counts: ByteCounts) -> bool:
    """Return True if a single GEMM over all tokens may form the weight gradient."""
    N = heads.rows
    return (
        counts.weight_sum > 0
        and dtype == heads.student_weight.dtype
        and not counts.weight_copy
        and may_depend_on_tokens(N)
        and N > 0
        and (heads.device.type == "cuda" or heads.classes >= 2 * N)
    )


def _copied(weight_VD: Tensor, dtype: torch.dtype) -> int:
    """Return the bytes per class of a copy of the weight; 0 if products can read the weight itself.

    On CUDA another dtype means autocast: one copy of the whole weight, which no workspace includes.
    """
    copies = (weight_VD.dtype != dtype and not weight_VD.is_cuda) or not multiplies(weight_VD)
    return weight_VD.shape[1] * dtype.itemsize if copies else 0
