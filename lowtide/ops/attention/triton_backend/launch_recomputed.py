"""Launch the kernels of backward that compute the scores again.

They are in kernels/recompute.py, kernels/confident_rows.py and kernels/whole_problems.py.

Shapes: B batches; H query heads; M queries, N keys; E features of values. dq, dk and dv are the
gradients of query, key and value.
"""

from torch import Tensor

from lowtide.core.kernels.backend import cdiv, next_power_of_2
from lowtide.ops.attention.triton_backend.kernels.confident_rows import confident_delta_kernel
from lowtide.ops.attention.triton_backend.kernels.recompute import (
    delta_kernel,
    key_value_gradient_kernel,
    query_gradient_kernel,
)
from lowtide.ops.attention.triton_backend.kernels.whole_problems import whole_problem_gradient_kernel
from lowtide.ops.attention.triton_backend.launch import VECTOR, KernelCall, step_of, strides_of
from lowtide.ops.attention.triton_backend.launch_stored_scores import StripMemory
from lowtide.ops.attention.triton_backend.parts_of_queries import part_count, sum_parts, with_parts
from lowtide.ops.attention.triton_backend.strips import Strip

# The queries of one program of delta_kernel.
ROWS = 64


def row_terms(call: KernelCall, out: Tensor, low: Tensor | None, statistics: Tensor) -> Tensor:
    """Return the numbers of each row that backward's tiles read (recompute.delta_kernel)."""
    B, H, _, M, _, _, E = call.size
    base_2 = call.constants["BASE_2"]
    row_terms = statistics.new_empty(B, H, 2 if base_2 else 3, M)
    tiles, block = cdiv(M, ROWS), min(128, max(16, next_power_of_2(E)))
    # Compute the step anew: hooks on saved tensors may have changed the strides of the result.
    step = step_of((out, low, call.grad_output), E)
    delta_kernel[(tiles * B * H,)](
        out, low, call.grad_output, call.grad_logsumexp, statistics, row_terms, out.stride(),
        strides_of(low), strides_of(call.grad_output), call.lse_strides, H, M, E, tiles, BASE_2=base_2,
        BLOCK_M=ROWS, BLOCK_E=block, CUT_E=step * (E % block > 0),
    )  # fmt: skip
    return row_terms


def confident_delta(kernel: str, call: KernelCall, heads: Strip) -> None:
    """Compute row_terms anew in float32, as `kernel` computes scores, where rows are confident.

    A row is confident if one key has more than half of its weight (kernels/confident_rows.py).
    `call` holds the operands as `kernel` reads them, in pieces or not. With two pieces (TF32
    allowed) nothing is done: the products' own errors are larger than that of delta.
    """
    if call.dtype.itemsize == 2 or call.pieces == 2:
        return
    tile = call.tile(kernel)
    tiles = cdiv(call.size.M, tile.M)
    # One stage: a pipeline of both products in pieces would take more shared memory than there is.
    confident_delta_kernel[(tiles * heads.batches * heads.groups * call.size.R,)](
        *call.tensors, call.grad_output, call.grad_logsumexp, call.row_terms, *call.strides,
        strides_of(call.grad_output), call.lse_strides, heads.batches, *call.sizes,
        heads.first_group * call.size.R, tiles, *call.scalars, **call.constants, PIECES=call.pieces,
        **tile.constants, num_warps=tile.warps, num_stages=1,
    )  # fmt: skip


def query_gradient(call: KernelCall) -> None:
    """Write dq, and the gradient of a bias that nothing shares, from recomputed scores."""
    B, H, _, M, _, _, _ = call.size
    tile = call.tile("query")
    tiles = cdiv(M, tile.M)
    query_gradient_kernel[(tiles * B * H, tile.blocks_K)](
        *call.tensors, call.grad_output, call.row_terms, call.grad_query, call.grad_bias, *call.strides,
        strides_of(call.grad_output), strides_of(call.grad_query), strides_of(call.grad_bias), *call.sizes,
        tiles, *call.scalars, **call.constants, **tile.constants, **tile.options,
    )  # fmt: skip


def key_value_gradient(call: KernelCall, strip: Strip, memory: StripMemory) -> bool:
    """Write dv, and dk unless stored gradients will give it; return True if dk is written."""
    if call.find_tile("key and value") is not None:
        _key_value("key and value", call, strip, memory)
        return True
    if call.pieces == 1 and memory.grad_scores is None and memory.grad_z is None:
        _key_value("key", call._replace(grad_value=None), strip, memory)
        _key_value("value", call._replace(grad_key=None, bias_sum=None), strip, memory)
        return True
    _key_value("value", call._replace(grad_key=None), strip, memory)
    return False


def _key_value(kernel: str, call: KernelCall, strip: Strip, memory: StripMemory) -> None:
    """Write those of dk, dv, bias_sum and the strip's stored gradients that have memory."""
    sums = call.grad_key, call.grad_value, call.bias_sum
    if all(each is None for each in (*sums, memory.grad_scores, memory.grad_z)):
        return
    tile = call.tile(kernel)
    tiles = cdiv(strip.keys, tile.N)
    blocks_k = 1 if call.grad_key is None else tile.blocks_K
    blocks_e = 1 if call.grad_value is None else tile.blocks_E
    programs, blocks = tiles * strip.batches * strip.groups, max(blocks_k, blocks_e)
    parts = part_count(programs * blocks, cdiv(call.size.M, tile.M))
    own = with_parts(call, strip, parts)
    constants = call.constants | {"BIAS_TRANSPOSED": call.transposed_bias is not None}
    if call.transposed_bias is not None:
        call, constants["BIAS_STEP"] = call._replace(bias=call.transposed_bias), VECTOR
    key_value_gradient_kernel[(programs, blocks, parts)](
        *call.tensors, call.row_first, call.row_end, call.grad_output, call.row_terms, own.grad_key,
        own.grad_value, own.bias_sum, memory.grad_scores, memory.grad_z, *call.strides,
        strides_of(call.grad_output), strides_of(own.grad_key), strides_of(own.grad_value), memory.strides,
        strip.batches, *call.sizes, strip.first_group, strip.first_key, tiles, *call.scalars, **constants,
        PIECES=call.pieces, IN_PARTS=parts > 1, **tile.constants, **tile.options,
    )  # fmt: skip
    if parts > 1:
        sum_parts(call, own, strip)


def whole_problems(call: KernelCall) -> None:
    """Write dq, dk and dv, each problem in one program."""
    B, H, *_ = call.size
    tile, grad_query = call.tile("whole problem"), call.grad_query
    assert grad_query is not None
    grad_query.zero_()  # programs add to it; float32 like its operand, as all these calls are
    whole_problem_gradient_kernel[(B * H,)](
        *call.tensors, call.row_first, call.row_end, call.grad_output, call.row_terms, grad_query,
        call.grad_key, call.grad_value, *call.strides, strides_of(call.grad_output), grad_query.stride(),
        strides_of(call.grad_key), strides_of(call.grad_value), H, *call.sizes[2:], *call.scalars,
        **call.constants, CUT=call.is_cut(tile), **tile.constants_of_one_block, **tile.options,
    )  # fmt: skip
