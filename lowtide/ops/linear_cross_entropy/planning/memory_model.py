"""Count the bytes of a call that engines have in common; an engine's own spec.py adds to them.

Shapes: N tokens, D features (of the first linear term; D_k of term k), V classes.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from lowtide.core.kernels import backend
from lowtide.core.kernels.backend import PRODUCT_ROWS
from lowtide.core.matmul import copied_bytes
from lowtide.core.strides import multiplies
from lowtide.ops.linear_cross_entropy.definition.head import VocabShard
from lowtide.ops.linear_cross_entropy.planning.byte_counts import ByteCounts
from lowtide.ops.linear_cross_entropy.planning.call import Call
from lowtide.ops.linear_cross_entropy.planning.operands import OperandAccess, follows_columns
from lowtide.ops.linear_cross_entropy.planning.weight_gradient import ENOUGH_ROWS, ROUNDED_CLASSES

STATISTICS = 24  # numbers per token of a chunk: row statistics and their temporaries
# Numbers per token for each part of the classes whose statistics are gathered, including the
# temporaries of their merge.
STATISTICS_OF_PART = 16
# Classes whose largest logit is a row's first reference on a rank without the target, in engines
# whose row statistics exclude it.
SAMPLED_CLASSES = 64


def with_shard(
    counts: ByteCounts, shard: VocabShard, sum_dtype: torch.dtype, features: Sequence[int], token_bytes: int
) -> ByteCounts:
    """Return the counts of a sharded head, whose engine holds `token_bytes` per token of a chunk.

    What the ranks gather comes on top. If tokens are sharded, those of three chunks are held, and
    no class block can be formed: it would gather all tokens once more.

    The chunks are those that the ranks agree on. So no sum can count on few chunks. A chunk takes
    all classes at a time, and holds its rows of dX until the ranks have summed them.
    """
    gathered = (shard.parts + 1) * STATISTICS_OF_PART * sum_dtype.itemsize
    if shard.tokens_sharded:
        gathered += 3 * sum(features) * sum_dtype.itemsize
    token_bytes += gathered
    one_product = counts.one_product_row and not shard.tokens_sharded
    return replace(
        counts,
        token_bytes=token_bytes,
        weight_sum=0 if shard.tokens_sharded else counts.weight_sum,
        one_product_row=token_bytes if one_product else 0,
        rounded_block=counts.rounded_block if one_product else 0,
        target_rows_bytes=counts.target_rows_bytes if one_product else 0,
        packed_sum_20=0,
        product=0,
        class_blocks=None,
    )


def counts_with_float32_sums(
    call: Call, access: OperandAccess, *, logits: int, block_logit: int, bias_vectors: int = 3
) -> ByteCounts:
    """Return the counts of an engine that sums each token's rows of dX in float32."""
    sums = sum(D_k * call.sum_size for D_k in with_gradient(call))
    return counts_of(call, access, logits=logits + sums, block_logit=block_logit, bias_vectors=bias_vectors)


def counts_of(
    call: Call, access: OperandAccess, *, logits: int, block_logit: int, vectors: int = 64, bias_vectors: int
) -> ByteCounts:
    """Return what all engines need.

    `logits` are the bytes of a token's logits and what goes with them, `vectors` bytes of small
    vectors per token, and `bias_vectors` how many vectors [V] a bias takes: the bias, its gradient,
    a chunk's share of that gradient, and temporaries of their size.
    """
    head, device, sum_size, size = call.head, call.device, call.sum_size, access.dtype.itemsize
    weight, *others = head.weights
    token_bytes, gathered = logits + STATISTICS * sum_size, 0
    for input, copied in zip(head.inputs, access.copies_rows):
        if copied:
            of_row, of_part = copied_bytes(input, access.dtype)
            token_bytes, gathered = token_bytes + of_row, max(gathered, of_part)
    further = 0
    for other, grad in zip(others, call.needs_grad.weights[1:]):  # small, and always accumulated
        further += _sum_bytes(call, other, grad)
        if other.dtype != access.dtype or not multiplies(other):
            further += call.V * other.shape[1] * size
    # A CUDA allocation is a multiple of 512 bytes, and about eighty vectors and numbers are
    # smaller.
    fixed = (vectors + 16 * sum_size) * call.N + gathered + further + (65536 if device == "cuda" else 8192)
    if head.bias is not None:
        fixed += bias_vectors * call.V * sum_size
    if call.call_kind.class_weights:
        fixed += call.V * sum_size
    # On CUDA another dtype means autocast: one copy of the whole weight, which no workspace
    # includes.
    copies_weight = (weight.dtype != access.dtype and device == "cpu") or not multiplies(weight)
    weight_sum = _sum_bytes(call, weight, call.needs_grad.weights[0])
    # On the CPU half of a packed sum lies in the gradient's memory (in_torch.py), by rows.
    halves = device == "cpu" and weight.dtype.itemsize * 2 == sum_size
    packs = halves and not follows_columns(weight, call.options)
    return ByteCounts(
        N=call.N,
        D=call.D,
        V=call.V,
        device=device,
        fixed=fixed,
        token_bytes=token_bytes,
        weight_sum=weight_sum,
        weight_copy=call.D * size if copies_weight else 0,
        class_sum=call.D * sum_size,
        block_logit=block_logit,
        block_row=2 * size * sum(call.features),
        product_rows=PRODUCT_ROWS,
        forms_dw=call.needs_grad.weights[0],
        further_terms=further,
        packed_sum=min(weight_sum, (call.V - call.V // 2) * call.D * sum_size) if packs else 0,
    )


def with_rounded_blocks(counts: ByteCounts, call: Call) -> ByteCounts:
    """Return the counts with a single GEMM for dW on a CPU, rounded block by block."""
    if not counts.weight_sum or not call.options.few_tokens:
        return counts
    block = min(call.V, ROUNDED_CLASSES) * counts.class_sum
    return replace(counts, one_product_row=counts.token_bytes, rounded_block=block)


def with_packed_sum(counts: ByteCounts, call: Call) -> ByteCounts:
    """Return the counts with the packed sum of a bfloat16 gradient (packed_triton.py).

    It takes one byte per weight beyond the gradient's memory, or half a byte.
    """
    if call.head.weights[0].dtype != torch.bfloat16:
        return counts
    V, D = counts.V, counts.D
    half = min(counts.weight_sum, V * D // 2)
    maps_sum = half > 0 and D % 16 == 0  # the tensor map of the lower bits requires it
    rows = 0
    if maps_sum and backend.pipelines_on(call.head.device):
        heights = (ENOUGH_ROWS, 2 * ENOUGH_ROWS)  # decision 0079
        rows = next((height for height in heights if backend.is_large_gemm(V, D, height)), 0)
    return replace(counts, packed_sum=min(counts.weight_sum, V * D), packed_sum_20=half, pipelined_rows=rows)


def with_gradient(call: Call) -> list[int]:
    """Return the features of each input that gets a gradient."""
    return [D_k for D_k, grad in zip(call.features, call.needs_grad.inputs) if grad]


def _sum_bytes(call: Call, weight: torch.Tensor, grad: bool) -> int:
    """Return the bytes of the float32 accumulator of a rounded weight gradient; else 0."""
    rounded = grad and weight.dtype != call.options.sum_dtype
    return call.V * weight.shape[1] * call.sum_size if rounded else 0
