"""Row tiles that are marked (exponentials.py says which), and the Triton kernel of a product anew for these.

Shapes: C tokens of a chunk, B classes of a block, D features; lower case = one tile.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from lowtide.linear_cross_entropy import exponential_kernels
from lowtide.linear_cross_entropy.exponential_kernels import describe

BLOCK_D, BLOCK_B = 128, 64
STAGES, WARPS = 3, 8


@triton.jit
def _repaired_product_kernel(
    exp_CB,
    weight_BD,
    repair_ptr,
    sum_CD_ptr,
    C,
    B,
    D,
    ADD: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """sum (+)= exp weight in row tiles that are marked. Grid: (C / BLOCK_C, D / BLOCK_D)."""
    tile_c, tile_d = tl.program_id(0), tl.program_id(1)
    if tl.load(repair_ptr + 1 + tile_c) != 0:
        sum_cd = tl.zeros((BLOCK_C, BLOCK_D), tl.float32)
        for start in range(0, B, BLOCK_B):
            exp_cb = exp_CB.load([tile_c * BLOCK_C, start])
            weight_bd = weight_BD.load([start, tile_d * BLOCK_D])
            sum_cd = tl.dot(exp_cb, weight_bd, sum_cd)
        rows = tile_c * BLOCK_C + tl.arange(0, BLOCK_C)
        columns = tile_d * BLOCK_D + tl.arange(0, BLOCK_D)
        place_cd = rows[:, None].to(tl.int64) * D + columns[None, :]
        mask_cd = (rows[:, None] < C) & (columns[None, :] < D)
        if ADD:
            sum_cd += tl.load(sum_CD_ptr + place_cd, mask=mask_cd, other=0.0)
        tl.store(sum_CD_ptr + place_cd, sum_cd, mask=mask_cd)


def tiles_of(rows_C: Tensor) -> tuple[Tensor, Tensor]:
    """The rows whose row tile has any of these; and marks: of any tile, and of each."""
    height = exponential_kernels.BLOCK_C
    marked = F.pad(rows_C, (0, -rows_C.shape[0] % height)).view(-1, height).any(1)
    repair = torch.cat([marked.any()[None], marked]).int()
    return marked[:, None].expand(-1, height).flatten()[: rows_C.shape[0]], repair


def repaired_product(sum_CD: Tensor, exp_CB: Tensor, weight_BD: Tensor, repair: Tensor, *, add: bool) -> None:
    """The marks are those of exponential_kernels.py's row tiles."""
    (C, B), D, height = exp_CB.shape, weight_BD.shape[1], exponential_kernels.BLOCK_C
    _repaired_product_kernel[(triton.cdiv(C, height), triton.cdiv(D, BLOCK_D))](
        describe(exp_CB, height, BLOCK_B),
        describe(weight_BD, BLOCK_B, BLOCK_D),
        repair,
        sum_CD,
        C,
        B,
        D,
        ADD=add,
        BLOCK_C=height,
        BLOCK_B=BLOCK_B,
        BLOCK_D=BLOCK_D,
        num_stages=STAGES,
        num_warps=WARPS,
    )
