"""Triton kernels of the path without a pass over the logits (exponentials.py has the mathematics), and
their launchers.

Shapes: C tokens of a chunk, D features, B classes of a block (all V wherever sums are taken); lower case =
one tile, p a part of its classes."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lowtide.linear_cross_entropy.kernels import tanh

# A tile of the logits. Its operands, three deep, and the stored half-tiles fill the shared memory of an H100.
BLOCK_C, BLOCK_B, BLOCK_D = 128, 256, 64
STAGES, WARPS = 3, 8
GROUP = 16  # row tiles that share a column of weight tiles while that is in the L2 cache

LOWEST = tl.constexpr(-3.0e38)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _exponentials_kernel(
    x_CD,
    weight_BD,
    exp_CB,
    reference_C_ptr,
    target_C_ptr,
    bias_B_ptr,
    scale_ptr,
    pull_C_ptr,
    tilt_C_ptr,
    repair_ptr,
    sum_ptr,
    mean_ptr,
    moment_ptr,
    max_ptr,
    argmax_ptr,
    C,
    B,
    D,
    first_class,
    STORE: tl.constexpr,
    REPAIR: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """E = exp(z - reference), 0 at the target, in bfloat16, times what the gradient has of it in each class;
    in float32, of each row and part of a tile, whichever of these have a pointer: the sum of E, of E (z -
    reference), of the stored value times u, and the largest z with its class. With `repair`, only row tiles
    that are marked. Grid: one program a multiprocessor, tiles in turn."""
    tiles_c, tiles_b = tl.cdiv(C, BLOCK_C), tl.cdiv(B, BLOCK_B)
    group_tiles = GROUP * tiles_b
    scale = 1.0
    if scale_ptr is not None:
        scale = tl.load(scale_ptr)
    for tile in tl.range(tl.program_id(0), tiles_c * tiles_b, PROGRAMS, flatten=not REPAIR):
        first_c = tile // group_tiles * GROUP
        height = min(tiles_c - first_c, GROUP)
        tile_c = first_c + tile % group_tiles % height
        tile_b = tile % group_tiles // height
        features = D
        if REPAIR:
            features = tl.where(tl.load(repair_ptr + tile_c) != 0, D, 0)
        if not REPAIR or features > 0:
            u_cb = tl.zeros((BLOCK_C, BLOCK_B), tl.float32)
            for start in range(0, features, BLOCK_D):
                x_cd = x_CD.load([tile_c * BLOCK_C, start])
                weight_bd = weight_BD.load([tile_b * BLOCK_B, start])
                u_cb = tl.dot(x_cd, weight_bd.T, u_cb)
            rows = tile_c * BLOCK_C + tl.arange(0, BLOCK_C)
            target_c = (tl.load(target_C_ptr + rows, mask=rows < C, other=0) - first_class).to(tl.int32)
            reference_c = tl.load(reference_C_ptr + rows, mask=rows < C, other=float("inf"))
            parts = (u_cb,)
            if PARTS == 2:  # one after the other: half the registers
                parts = tl.split(tl.permute(tl.reshape(u_cb, (BLOCK_C, 2, BLOCK_B // 2)), (0, 2, 1)))
            for part in tl.static_range(PARTS):
                u_cp = parts[part]
                first = tile_b * BLOCK_B + part * (BLOCK_B // PARTS)
                columns = first + tl.arange(0, BLOCK_B // PARTS)
                place = (PARTS * tile_b + part).to(tl.int64) * C + rows
                # An ignored row's reference is infinite: it adds nothing, whatever its logits are.
                counts_cp = (columns[None, :] < B) & (reference_c[:, None] < float("inf"))
                if bias_B_ptr is not None:
                    u_cp += tl.load(bias_B_ptr + columns, mask=columns < B, other=0.0)[None, :]
                z_cp = u_cp
                if scale_ptr is not None:
                    z_cp = u_cp * scale
                if SOFTCAP > 0:
                    capped_cp = tanh(z_cp * (1.0 / SOFTCAP))
                    z_cp = capped_cp * SOFTCAP
                if max_ptr is not None:
                    z_cp = tl.where(columns[None, :] < B, z_cp, -float("inf"))
                    max_c = tl.max(z_cp, 1)
                    tl.store(max_ptr + place, max_c, mask=rows < C)
                    if argmax_ptr is not None:
                        # A second reduction is cheaper than one that carries the index along.
                        argmax_c = tl.min(tl.where(z_cp == max_c[:, None], columns[None, :], B - 1), 1)
                        tl.store(argmax_ptr + place, argmax_c, mask=rows < C)
                if sum_ptr is not None:
                    shift_cp = z_cp - reference_c[:, None]
                    exp_cp = tl.exp2(shift_cp * LOG2_E)
                    exp_cp = tl.where(counts_cp & (columns[None, :] != target_c[:, None]), exp_cp, 0.0)
                    tl.store(sum_ptr + place, tl.sum(exp_cp, 1), mask=rows < C)
                    if tilt_C_ptr is not None or mean_ptr is not None:
                        # Finite: a class that is excluded (z = -inf), and what is masked, adds 0.
                        shift_cp = tl.minimum(tl.maximum(shift_cp, LOWEST), -LOWEST)
                    if mean_ptr is not None:
                        tl.store(mean_ptr + place, tl.sum(exp_cp * shift_cp, 1), mask=rows < C)
                    if tilt_C_ptr is not None:
                        pull_c = tl.load(pull_C_ptr + rows, mask=rows < C, other=0.0)
                        tilt_c = tl.load(tilt_C_ptr + rows, mask=rows < C, other=0.0)
                        exp_cp *= pull_c[:, None] + tilt_c[:, None] * shift_cp
                    if SOFTCAP > 0:
                        exp_cp *= 1.0 - capped_cp * capped_cp
                    if moment_ptr is not None:
                        product_cp = tl.where(exp_cp == 0.0, 0.0, exp_cp * u_cp)
                        tl.store(moment_ptr + place, tl.sum(product_cp, 1), mask=rows < C)
                    if STORE:
                        exp_CB.store([tile_c * BLOCK_C, first], exp_cp.to(exp_CB.dtype))


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
    ignored_C_ptr,
    scale_C_ptr,
    hit_C_ptr,
    spread_C_ptr,
    total_weight_D_ptr,
    factor_ptr,
    out_CD_ptr,
    weight_stride,
    out_stride,
    D,
    BLOCK: tl.constexpr,
):
    """out[c] = factor (scale[c] product[c] + hit[c] weight[target[c]] - spread[c] total_weight). Grid: one
    program a row."""
    row = tl.program_id(0).to(tl.int64)
    scale, hit, ignored = tl.load(scale_C_ptr + row), tl.load(hit_C_ptr + row), tl.load(ignored_C_ptr + row)
    target, factor = tl.load(target_C_ptr + row), tl.load(factor_ptr)
    for start in range(0, D, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        sum_d = tl.load(product_CD_ptr + row * D + columns, mask=columns < D, other=0.0) * scale
        weight_d = tl.load(weight_VD_ptr + target * weight_stride + columns, mask=columns < D, other=0.0)
        grad_d = sum_d + hit * weight_d.to(tl.float32)
        if spread_C_ptr is not None:
            total_d = tl.load(total_weight_D_ptr + columns, mask=columns < D, other=0.0)
            grad_d -= tl.load(spread_C_ptr + row) * total_d
        grad_d = tl.where(ignored, 0.0, grad_d * factor)
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
    """The first kernel on one chunk and one block of classes: its descriptors, made once and run once or
    more."""

    def __init__(
        self,
        x_CD: Tensor,
        weight_BD: Tensor,
        reference_C: Tensor,
        target_C: Tensor,
        *,
        out_CB: Tensor | None,
        bias_B: Tensor | None = None,
        scale: Tensor | None = None,
        softcap: float = 0.0,
        pull_C: Tensor | None = None,
        tilt_C: Tensor | None = None,
        first_class: int = 0,
        parts: int = 1,
    ) -> None:
        self.C, self.B, self.D = x_CD.shape[0], weight_BD.shape[0], x_CD.shape[1]
        self.x_CD, self.weight_BD = _describe(x_CD, BLOCK_C, BLOCK_D), _describe(weight_BD, BLOCK_B, BLOCK_D)
        self.out_CB = None if out_CB is None else _describe(out_CB, BLOCK_C, BLOCK_B // parts)
        self.reference_C, self.target_C, self.first_class = reference_C, target_C, first_class
        self.bias_B, self.scale, self.softcap = bias_B, scale, softcap
        self.pull_C, self.tilt_C, self.parts = pull_C, tilt_C, parts
        self.device = x_CD.device
        self.programs = multiprocessors(x_CD.device)

    def partials(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[parts of tiles, C]: what the kernel finds in each."""
        return torch.empty(self.parts * triton.cdiv(self.B, BLOCK_B), self.C, dtype=dtype, device=self.device)

    def run(
        self,
        *,
        sums: Tensor | None = None,
        means: Tensor | None = None,
        moments: Tensor | None = None,
        maxima: Tensor | None = None,
        places: Tensor | None = None,
        repair: Tensor | None = None,
    ) -> None:
        """Fills the partials that are given, of the row tiles that `repair` marks (of all without it), and
        stores E where there is a place for it and its sums are asked for."""
        _exponentials_kernel[(self.programs,)](
            self.x_CD,
            self.weight_BD,
            self.out_CB,
            self.reference_C,
            self.target_C,
            self.bias_B,
            self.scale,
            self.pull_C,
            self.tilt_C,
            repair,
            sums,
            means,
            moments,
            maxima,
            places,
            self.C,
            self.B,
            self.D,
            self.first_class,
            STORE=self.out_CB is not None and sums is not None,
            REPAIR=repair is not None,
            SOFTCAP=self.softcap,
            PROGRAMS=self.programs,
            GROUP=GROUP,
            PARTS=self.parts,
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
    ignored_C: Tensor,
    scale_C: Tensor,
    hit_C: Tensor,
    spread_C: Tensor | None,
    total_weight_D: Tensor | None,
    factor: Tensor,
    out_CD: Tensor,
) -> None:
    C, D = product_CD.shape
    _input_gradient_kernel[(C,)](
        product_CD,
        weight_VD,
        target_C,
        ignored_C,
        scale_C,
        hit_C,
        spread_C,
        total_weight_D,
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
