"""Triton kernels of the path without a pass over the logits (exponentials.py has the mathematics), and
their launchers.

Shapes: C tokens of a chunk, D features, B classes of a block (all V wherever sums are taken); lower case =
one tile."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

# A tile of the logits. Its operands, three deep, and the stored half-tiles fill the shared memory of an H100.
BLOCK_C, BLOCK_B, BLOCK_D = 128, 256, 64
STAGES, WARPS = 3, 8
GROUP = 16  # row tiles that share a column of weight tiles while that is in the L2 cache

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _exponentials_kernel(
    x_CD,
    weight_BD,
    exp_CB,
    reference_C_ptr,
    target_C_ptr,
    repair_ptr,
    partial_ptr,
    C,
    B,
    D,
    first_class,
    STORE: tl.constexpr,
    REPAIR: tl.constexpr,
    MAXIMUM: tl.constexpr,
    PROGRAMS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """E = exp(x w^T - reference), 0 at the target, in bfloat16; per row and tile its float32 sum (or the
    logits' maximum). With REPAIR, only row tiles that are marked. Grid: one program a multiprocessor, tiles
    in turn."""
    tiles_c, tiles_b = tl.cdiv(C, BLOCK_C), tl.cdiv(B, BLOCK_B)
    group_tiles = GROUP * tiles_b
    for tile in tl.range(tl.program_id(0), tiles_c * tiles_b, PROGRAMS, flatten=not REPAIR):
        first_c = tile // group_tiles * GROUP
        height = min(tiles_c - first_c, GROUP)
        tile_c = first_c + tile % group_tiles % height
        tile_b = tile % group_tiles // height
        features = D
        if REPAIR:
            features = tl.where(tl.load(repair_ptr + tile_c) != 0, D, 0)
        if not REPAIR or features > 0:
            z_cb = tl.zeros((BLOCK_C, BLOCK_B), tl.float32)
            for start in range(0, features, BLOCK_D):
                x_cd = x_CD.load([tile_c * BLOCK_C, start])
                weight_bd = weight_BD.load([tile_b * BLOCK_B, start])
                z_cb = tl.dot(x_cd, weight_bd.T, z_cb)
            rows = tile_c * BLOCK_C + tl.arange(0, BLOCK_C)
            columns = tile_b * BLOCK_B + tl.arange(0, BLOCK_B)
            target_c = (tl.load(target_C_ptr + rows, mask=rows < C, other=0) - first_class).to(tl.int32)
            reference_c = tl.load(reference_C_ptr + rows, mask=rows < C, other=float("inf"))
            # An ignored row's reference is infinite: it adds nothing, whatever its logits are.
            counts_cb = (columns[None, :] < B) & (reference_c[:, None] < float("inf"))
            if MAXIMUM:
                partial_c = tl.max(tl.where(counts_cb, z_cb, -float("inf")), 1)
            else:
                exp_cb = tl.exp2((z_cb - reference_c[:, None]) * LOG2_E)
                exp_cb = tl.where(counts_cb & (columns[None, :] != target_c[:, None]), exp_cb, 0.0)
                partial_c = tl.sum(exp_cb, 1)
                if STORE:
                    exp_CB.store([tile_c * BLOCK_C, tile_b * BLOCK_B], exp_cb.to(exp_CB.dtype))
            tl.store(partial_ptr + tile_b.to(tl.int64) * C + rows, partial_c, mask=rows < C)


@triton.jit
def _target_logits_kernel(
    x_CD_ptr, weight_VD_ptr, target_C_ptr, logit_C_ptr, x_stride, weight_stride, D, BLOCK: tl.constexpr
):
    """logit[c] = x[c] . weight[target[c]]. Grid: one program a row."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_C_ptr + row)
    dot_d = tl.zeros([BLOCK], tl.float32)
    for start in range(0, D, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x_d = tl.load(x_CD_ptr + row * x_stride + columns, mask=columns < D, other=0.0)
        weight_d = tl.load(weight_VD_ptr + target * weight_stride + columns, mask=columns < D, other=0.0)
        dot_d += x_d.to(tl.float32) * weight_d.to(tl.float32)
    tl.store(logit_C_ptr + row, tl.sum(dot_d, 0))


@triton.jit
def _scale_rows_kernel(x_CD_ptr, scale_C_ptr, out_CD_ptr, x_stride, out_stride, D, BLOCK: tl.constexpr):
    """out[c] = scale[c] x[c], 0 where scale is 0. Grid: one program a row."""
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(scale_C_ptr + row)
    for start in range(0, D, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x_d = tl.load(x_CD_ptr + row * x_stride + columns, mask=columns < D, other=0.0).to(tl.float32)
        x_d = tl.where(scale == 0.0, 0.0, x_d * scale)
        tl.store(
            out_CD_ptr + row * out_stride + columns, x_d.to(out_CD_ptr.dtype.element_ty), mask=columns < D
        )


@triton.jit
def _input_gradient_kernel(
    product_CD_ptr,
    weight_VD_ptr,
    target_C_ptr,
    scale_C_ptr,
    hit_C_ptr,
    factor_ptr,
    out_CD_ptr,
    weight_stride,
    out_stride,
    D,
    BLOCK: tl.constexpr,
):
    """out[c] = factor (scale[c] product[c] + hit[c] weight[target[c]]). Grid: one program a row."""
    row = tl.program_id(0).to(tl.int64)
    scale, hit = tl.load(scale_C_ptr + row), tl.load(hit_C_ptr + row)
    target, factor = tl.load(target_C_ptr + row), tl.load(factor_ptr)
    for start in range(0, D, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        sum_d = tl.load(product_CD_ptr + row * D + columns, mask=columns < D, other=0.0) * scale
        weight_d = tl.load(weight_VD_ptr + target * weight_stride + columns, mask=columns < D, other=0.0)
        grad_d = (sum_d + hit * weight_d.to(tl.float32)) * factor
        grad_d = tl.where(scale == 0.0, 0.0, grad_d)
        tl.store(
            out_CD_ptr + row * out_stride + columns, grad_d.to(out_CD_ptr.dtype.element_ty), mask=columns < D
        )


@triton.jit
def _add_target_rows_kernel(
    x_ptr,
    hit_N_ptr,
    class_N_ptr,
    order_N_ptr,
    sum_BD_ptr,
    outer_stride,
    inner_stride,
    inner,
    N,
    D,
    first_class,
    B,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """sum[v] += sum over rows n with target v of hit[n] x[n]. The classes come sorted, with their rows in
    `order`; the program at the first row of a class adds them all up, in order: the same bits every time.
    Grid: (N, D / BLOCK)."""
    first = tl.program_id(0)
    target = tl.load(class_N_ptr + first)
    before = tl.load(class_N_ptr + tl.maximum(first - 1, 0))
    head = (first == 0) | (before != target)
    if head & (target >= first_class) & (target < first_class + B):
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        sum_ptr = sum_BD_ptr + (target - first_class).to(tl.int64) * D + columns
        sum_d = tl.load(sum_ptr, mask=columns < D, other=0.0)
        row = tl.load(order_N_ptr + first).to(tl.int64)
        x_d = tl.load(
            x_ptr + row // inner * outer_stride + row % inner * inner_stride + columns,
            mask=columns < D,
            other=0.0,
        )
        sum_d += tl.load(hit_N_ptr + row) * x_d.to(tl.float32)
        # Most classes have that one row; a frequent one may have thousands, taken BLOCK_N at a time.
        start = first + 1
        after = tl.load(class_N_ptr + tl.minimum(start, N - 1))
        same = ((start < N) & (after == target)).to(tl.int32)
        while same > 0:
            place_n = start + tl.arange(0, BLOCK_N)
            same_n = (place_n < N) & (tl.load(class_N_ptr + place_n, mask=place_n < N, other=-1) == target)
            row_n = tl.load(order_N_ptr + place_n, mask=same_n, other=0).to(tl.int64)
            hit_n = tl.load(hit_N_ptr + row_n, mask=same_n, other=0.0)
            x_nd = tl.load(
                x_ptr
                + (row_n // inner * outer_stride + row_n % inner * inner_stride)[:, None]
                + columns[None, :],
                mask=same_n[:, None] & (columns[None, :] < D),
                other=0.0,
            )
            sum_d += tl.sum(hit_n[:, None] * x_nd.to(tl.float32), 0)
            start += BLOCK_N
            same = tl.min(same_n.to(tl.int32), 0)
        tl.store(sum_ptr, sum_d, mask=columns < D)


class Exponentials:
    """The first kernel on one chunk and one block of classes: its descriptors and sums, made once and run
    once or more."""

    def __init__(
        self,
        x_CD: Tensor,
        weight_BD: Tensor,
        reference_C: Tensor,
        target_C: Tensor,
        *,
        out_CB: Tensor | None,
        first_class: int = 0,
    ) -> None:
        self.C, self.B, self.D = x_CD.shape[0], weight_BD.shape[0], x_CD.shape[1]
        self.x_CD, self.weight_BD = _describe(x_CD, BLOCK_C, BLOCK_D), _describe(weight_BD, BLOCK_B, BLOCK_D)
        self.out_CB = None if out_CB is None else _describe(out_CB, BLOCK_C, BLOCK_B)
        self.reference_C, self.target_C, self.first_class = reference_C, target_C, first_class
        tiles = triton.cdiv(self.B, BLOCK_B)
        self.partial = torch.empty(tiles, self.C, dtype=torch.float32, device=x_CD.device)
        self.programs = multiprocessors(x_CD.device)

    def sums(self) -> Tensor:  # [C]
        self._run(repair=None, maximum=False)
        return self.partial.sum(0)

    def maxima(self, repair: Tensor) -> Tensor:  # [C], of marked row tiles
        self._run(repair=repair, maximum=True)
        return self.partial.amax(0)

    def repaired_sums(self, repair: Tensor) -> Tensor:
        self._run(repair=repair, maximum=False)
        return self.partial.sum(0)

    def _run(self, *, repair: Tensor | None, maximum: bool) -> None:
        _exponentials_kernel[(self.programs,)](
            self.x_CD,
            self.weight_BD,
            self.out_CB,
            self.reference_C,
            self.target_C,
            repair,
            self.partial,
            self.C,
            self.B,
            self.D,
            self.first_class,
            STORE=self.out_CB is not None and not maximum,
            REPAIR=repair is not None,
            MAXIMUM=maximum,
            PROGRAMS=self.programs,
            GROUP=GROUP,
            BLOCK_C=BLOCK_C,
            BLOCK_B=BLOCK_B,
            BLOCK_D=BLOCK_D,
            num_stages=STAGES,
            num_warps=WARPS,
        )


def target_logits(x_CD: Tensor, weight_VD: Tensor, target_C: Tensor) -> Tensor:  # [C]
    C, D = x_CD.shape
    logit_C = torch.empty(C, dtype=torch.float32, device=x_CD.device)
    _target_logits_kernel[(C,)](
        x_CD, weight_VD, target_C, logit_C, x_CD.stride(0), weight_VD.stride(0), D, BLOCK=_width(D)
    )
    return logit_C


def scale_rows(x_CD: Tensor, scale_C: Tensor, out_CD: Tensor) -> None:
    C, D = x_CD.shape
    _scale_rows_kernel[(C,)](x_CD, scale_C, out_CD, x_CD.stride(0), out_CD.stride(0), D, BLOCK=_width(D))


def input_gradient(
    product_CD: Tensor,
    weight_VD: Tensor,
    target_C: Tensor,
    scale_C: Tensor,
    hit_C: Tensor,
    factor: Tensor,
    out_CD: Tensor,
) -> None:
    C, D = product_CD.shape
    _input_gradient_kernel[(C,)](
        product_CD,
        weight_VD,
        target_C,
        scale_C,
        hit_C,
        factor,
        out_CD,
        weight_VD.stride(0),
        out_CD.stride(0),
        D,
        BLOCK=_width(D),
    )


def add_target_rows(
    sum_BD: Tensor, x: Tensor, hit_N: Tensor, class_N: Tensor, order_N: Tensor, *, first_class: int
) -> None:
    """x is [N, D], or [outer, inner, D] where that is no view of [N, D]."""
    N, D = class_N.shape[0], x.shape[-1]
    inner = x.shape[-2]
    block = min(512, _width(D))
    _add_target_rows_kernel[(N, triton.cdiv(D, block))](
        x,
        hit_N,
        class_N,
        order_N,
        sum_BD,
        x.stride(0) if x.dim() == 3 else 0,
        x.stride(-2),
        inner,
        N,
        D,
        first_class,
        sum_BD.shape[0],
        BLOCK_N=16,
        BLOCK=block,
    )


def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def _describe(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [rows, columns])


def _width(D: int) -> int:
    return min(1024, triton.next_power_of_2(D))
