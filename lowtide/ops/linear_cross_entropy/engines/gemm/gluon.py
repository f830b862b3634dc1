"""Matrix products on a Hopper card, in Gluon: one warp that loads tiles and two groups of four that multiply,
64 rows of a tile each, and do with them what a kernel does. The groups do not wait for each other, so what
one leaves hides behind what the other multiplies; kernels in Triton itself, whose warps go together, do not
hide it (decision 0039).

Tiles go around in a ring of stages. A stage holds BLOCK_A rows of one operand, in two halves, and BLOCK_B of
the other, for BLOCK_K of the numbers that are summed up; or whatever else a kernel loads into that room.
`step` counts stages that went by, on either side.

backend.py says where this runs. Triton's interpreter does not know Gluon: what a kernel does with its
tiles is a function for both languages.
"""

import functools

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

BLOCK_A, BLOCK_B, BLOCK_K = 128, 256, 64
STAGES = 4
WARPS = 4  # of a group that multiplies; the other group and the loader are beside them
REGISTERS = (232, 40)  # of a thread of the second group, and of the loader

# Two names that are others since Triton 3.7.
load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

HALF, WIDTH, DEPTH = tl.constexpr(BLOCK_A // 2), tl.constexpr(BLOCK_B), tl.constexpr(BLOCK_K)

DTYPES = {
    torch.bfloat16: gl.bfloat16,
    torch.float32: gl.float32,
    torch.int32: gl.int32,
    torch.int16: gl.int16,
    torch.uint16: gl.uint16,
    torch.uint8: gl.uint8,
}


@functools.cache  # Triton takes 10 microseconds to think of it
def _layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, columns], DTYPES[dtype])


def describe(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    shape, strides = list(tensor.shape), list(tensor.stride())
    layout = _layout(rows, columns, tensor.dtype)
    return TensorDescriptor(tensor, shape, strides, [rows, columns], layout)


@tl.core.builtin
def view(buffer, dtype, shape, layout, _semantic=None):
    """A stage's memory as that of something else."""
    reinterpret = getattr(buffer, "reinterpret", None) or buffer._reinterpret
    return reinterpret(dtype, shape, layout, _semantic=_semantic)


@tl.core.builtin
def given(*arguments, _semantic=None):
    """Arguments of a kernel as a tuple for its warps, which may not hold None as such."""
    return tl.tuple([tl.constexpr(None) if each is None else each for each in arguments])


@gluon.jit
def ring(a, b, STAGES: gl.constexpr, TURNED: gl.constexpr):
    """The stages' memory for tiles of these descriptors, and their barriers: full, and empty again. TURNED:
    what is summed up goes along the rows of both operands."""
    # Of other boxes other bytes would come than are waited for.
    K: gl.constexpr = 0 if TURNED else 1
    gl.static_assert(a.block_shape[K] == DEPTH and a.block_shape[1 - K] == HALF)
    gl.static_assert(b.block_shape[K] == DEPTH and b.block_shape[1 - K] == WIDTH)
    A_SHAPE: gl.constexpr = [2 * STAGES, DEPTH, HALF] if TURNED else [2 * STAGES, HALF, DEPTH]
    B_SHAPE: gl.constexpr = [STAGES, DEPTH, WIDTH] if TURNED else [STAGES, WIDTH, DEPTH]
    a_s = gl.allocate_shared_memory(gl.bfloat16, A_SHAPE, a.layout)
    b_s = gl.allocate_shared_memory(gl.bfloat16, B_SHAPE, b.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    return a_s, b_s, full, empty


@gluon.jit
def take(empty, step, STAGES: gl.constexpr):
    """For the loader: waits until nobody reads the next stage any more."""
    stage = step % STAGES
    mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
    return stage


@gluon.jit
def load_tiles(
    a, b, row_a, row_b, k, a_s, b_s, full, empty, step, STAGES: gl.constexpr, TURNED: gl.constexpr
):  # fmt: skip
    """One stage of operands."""
    stage = take(empty, step, STAGES)
    mbarrier.expect(full.index(stage), (2 * HALF + WIDTH) * DEPTH * 2)
    for half in gl.static_range(2):
        if TURNED:
            load(a, [k, row_a + half * HALF], full.index(stage), a_s.index(2 * stage + half))
        else:
            load(a, [row_a + half * HALF, k], full.index(stage), a_s.index(2 * stage + half))
    if TURNED:
        load(b, [k, row_b], full.index(stage), b_s.index(stage))
    else:
        load(b, [row_b, k], full.index(stage), b_s.index(stage))
    return step + 1


@gluon.jit
def load_product(
    x, weight, other_x, other_weight, row, first, D, a_s, b_s, full, empty, step, STAGES: gl.constexpr
):  # fmt: skip
    """All operands of a tile, features along their columns; the other term's in one stage."""
    for k in range(0, D, DEPTH):
        step = load_tiles(x, weight, row, first, k, a_s, b_s, full, empty, step, STAGES, False)
    if other_x is not None:
        step = load_tiles(other_x, other_weight, row, first, 0, a_s, b_s, full, empty, step, STAGES, False)
    return step


@gluon.jit
def leave_tile(tile, tile_s, out, place, PENDING: gl.constexpr):
    """To where it belongs, through shared memory that at most PENDING later stores may still read."""
    tma.store_wait(PENDING)
    tl.debug_barrier()
    tile_s.store(tile)
    fence_async_shared()
    tl.debug_barrier()
    store(out, place, tile_s)


@gluon.jit
def await_stage(full, step, STAGES: gl.constexpr):
    """For a group: waits until the next stage is there."""
    stage = step % STAGES
    mbarrier.wait(full.index(stage), step // STAGES & 1)
    return stage


@gluon.jit
def give_back(empty, step, condition, STAGES: gl.constexpr):
    """The stage before `step`, when all warps of the group are done with it."""
    tl.debug_barrier()
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=condition)


@gluon.jit
def multiply(
    a_s, b_s, full, empty, step, steps,
    WHICH: gl.constexpr, STAGES: gl.constexpr, TURNED: gl.constexpr,
):  # fmt: skip
    """The sum of so many stages' products, [HALF, WIDTH] in float32, of the rows of one group. One runs while
    the next is started, and its stage is given back a step later."""
    sum_ab = gl.zeros(
        (HALF, WIDTH), gl.float32,
        gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16]),
    )  # fmt: skip
    for at in range(steps):
        stage = await_stage(full, step, STAGES)
        a = a_s.index(2 * stage + WHICH)
        b = b_s.index(stage)
        if TURNED:
            sum_ab = warpgroup_mma(a.permute((1, 0)), b, sum_ab, use_acc=at > 0, is_async=True)
        else:
            sum_ab = warpgroup_mma(a, b.permute((1, 0)), sum_ab, use_acc=at > 0, is_async=True)
        sum_ab = warpgroup_mma_wait(1, deps=[sum_ab])
        give_back(empty, step, at > 0, STAGES)
        step += 1
    sum_ab = warpgroup_mma_wait(0, deps=[sum_ab])
    give_back(empty, step, steps > 0, STAGES)
    return sum_ab, step
