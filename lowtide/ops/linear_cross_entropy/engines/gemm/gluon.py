"""Multiply matrices on a Hopper GPU, in Gluon, with an epilogue that overlaps the next product.

One TMA producer warp loads tiles. Two consumer warpgroups multiply 64 rows of a tile each, and each
runs its own epilogue. The warpgroups do not wait for each other, so the epilogue of one overlaps
the products of the other. In a Triton kernel all warps of a tile advance together, so nothing
overlaps (decision 0039).

Operands pass through a ring of stages in shared memory. A stage holds BLOCK_A rows of one operand,
in two halves, and BLOCK_B rows of the other, for BLOCK_K of the inner dimension. A kernel may also
use a stage for other data that its epilogue reads. The producer and each consumer count in `step`
the stages that they have used; the next one is step % STAGES. Each stage has two barriers: "full"
completes when the stage is loaded, "empty" when both consumers have released it.

lowtide/core/kernels/backend.py says where this runs. Triton's interpreter does not support Gluon,
so each epilogue is a function that works in both languages.
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
WARPS = 4  # of the first consumer warpgroup; Gluon adds those of the second and of the producer
REGISTERS = (232, 40)  # per thread, of the second consumer warpgroup and of the producer

# Two functions were renamed in Triton 3.7.
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


@functools.cache  # Triton takes 10 microseconds to compute a layout
def _layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, columns], DTYPES[dtype])


def describe(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Return a tensor descriptor that loads and stores boxes of rows x columns."""
    shape, strides = list(tensor.shape), list(tensor.stride())
    layout = _layout(rows, columns, tensor.dtype)
    return TensorDescriptor(tensor, shape, strides, [rows, columns], layout)


def described(term: tuple[Tensor, Tensor] | None) -> tuple[TensorDescriptor | None, TensorDescriptor | None]:
    """Return tensor descriptors of a term's input and weight, or two None."""
    if term is None:
        return None, None
    x_CD, weight_BD = term
    return describe(x_CD, BLOCK_A // 2, BLOCK_K), describe(weight_BD, BLOCK_B, BLOCK_K)


@tl.core.builtin
def view(buffer, dtype, shape, layout, _semantic=None):
    """Return a stage's memory, reinterpreted with another dtype, shape and layout."""
    reinterpret = getattr(buffer, "reinterpret", None) or buffer._reinterpret
    return reinterpret(dtype, shape, layout, _semantic=_semantic)


@tl.core.builtin
def pack_args(*arguments, _semantic=None):
    """Pack kernel arguments into a tuple for a warpgroup, with each None as a constexpr."""
    return tl.tuple([tl.constexpr(None) if each is None else each for each in arguments])


@gluon.jit
def ring(a, b, STAGES: gl.constexpr, TRANSPOSED: gl.constexpr):
    """Allocate the ring's memory for two operands, given by descriptors, and its barriers.

    TRANSPOSED: both operands are stored [inner, outer], so each tile is transposed.
    """
    # `load_tiles` tells the barriers how many bytes to wait for, which only these boxes have.
    K: gl.constexpr = 0 if TRANSPOSED else 1
    gl.static_assert(a.block_shape[K] == DEPTH and a.block_shape[1 - K] == HALF)
    gl.static_assert(b.block_shape[K] == DEPTH and b.block_shape[1 - K] == WIDTH)
    A_SHAPE: gl.constexpr = [2 * STAGES, DEPTH, HALF] if TRANSPOSED else [2 * STAGES, HALF, DEPTH]
    B_SHAPE: gl.constexpr = [STAGES, DEPTH, WIDTH] if TRANSPOSED else [STAGES, WIDTH, DEPTH]
    a_s = gl.allocate_shared_memory(gl.bfloat16, A_SHAPE, a.layout)
    b_s = gl.allocate_shared_memory(gl.bfloat16, B_SHAPE, b.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    return a_s, b_s, full, empty


@gluon.jit
def acquire_empty(empty, step, STAGES: gl.constexpr):
    """Wait, as the producer, until the next stage is empty; return its number."""
    stage = step % STAGES
    mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
    return stage


@gluon.jit
def load_tiles(
    a, b, row_a, row_b, k, a_s, b_s, full, empty, step, STAGES: gl.constexpr, TRANSPOSED: gl.constexpr
):  # fmt: skip
    """Load one stage of operands, as the producer, and return the next step."""
    stage = acquire_empty(empty, step, STAGES)
    mbarrier.expect(full.index(stage), (2 * HALF + WIDTH) * DEPTH * 2)
    for half in gl.static_range(2):
        if TRANSPOSED:
            load(a, [k, row_a + half * HALF], full.index(stage), a_s.index(2 * stage + half))
        else:
            load(a, [row_a + half * HALF, k], full.index(stage), a_s.index(2 * stage + half))
    if TRANSPOSED:
        load(b, [k, row_b], full.index(stage), b_s.index(stage))
    else:
        load(b, [row_b, k], full.index(stage), b_s.index(stage))
    return step + 1


@gluon.jit
def load_product(
    x, weight, other_x, other_weight, row, first, D, a_s, b_s, full, empty, step, STAGES: gl.constexpr
):  # fmt: skip
    """Load the operands of a tile, whose columns are features, and return the next step.

    A second term takes one stage.
    """
    for k in range(0, D, DEPTH):
        step = load_tiles(x, weight, row, first, k, a_s, b_s, full, empty, step, STAGES, False)
    if other_x is not None:
        step = load_tiles(other_x, other_weight, row, first, 0, a_s, b_s, full, empty, step, STAGES, False)
    return step


@gluon.jit
def store_tile(tile, tile_s, out, place):
    """Store a tile through tile_s, after earlier stores have read from that shared memory."""
    tma.store_wait(0)
    tl.debug_barrier()
    tile_s.store(tile)
    fence_async_shared()
    tl.debug_barrier()
    store(out, place, tile_s)


@gluon.jit
def await_stage(full, step, STAGES: gl.constexpr):
    """Wait, as a consumer, until the next stage is loaded; return its number."""
    stage = step % STAGES
    mbarrier.wait(full.index(stage), step // STAGES & 1)
    return stage


@gluon.jit
def release(empty, step, condition, STAGES: gl.constexpr):
    """Release the stage of the previous step, after all warps of the consumer are done with it.

    Without `condition`, only wait for the consumer's other warps.
    """
    tl.debug_barrier()
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=condition)


@gluon.jit
def multiply(
    a_s, b_s, full, empty, step, steps,
    WHICH: gl.constexpr, STAGES: gl.constexpr, TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """Return the sum of the products of `steps` stages for consumer WHICH, and the next step.

    The sum is float32 [HALF, WIDTH]. Each product starts while the previous one still runs, so a
    stage is released one step later.
    """
    sum_ab = gl.zeros(
        (HALF, WIDTH), gl.float32,
        gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16]),
    )  # fmt: skip
    for at in range(steps):
        stage = await_stage(full, step, STAGES)
        a = a_s.index(2 * stage + WHICH)
        b = b_s.index(stage)
        if TRANSPOSED:
            sum_ab = warpgroup_mma(a.permute((1, 0)), b, sum_ab, use_acc=at > 0, is_async=True)
        else:
            sum_ab = warpgroup_mma(a, b.permute((1, 0)), sum_ab, use_acc=at > 0, is_async=True)
        sum_ab = warpgroup_mma_wait(1, deps=[sum_ab])
        release(empty, step, at > 0, STAGES)
        step += 1
    sum_ab = warpgroup_mma_wait(0, deps=[sum_ab])
    release(empty, step, steps > 0, STAGES)
    return sum_ab, step
