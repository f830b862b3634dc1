"""Compute what the operators do not support: derivatives of higher order, forward mode, vmap.

The definition itself is differentiated, a chunk of queries at a time (core/rowwise/). The
results are exact and take O(M) memory, but the computation is slow.

Shapes: B batches, H query heads, G key heads, M queries (m in a chunk), N keys, K features, E of
values.
"""

from torch import Tensor

from lowtide.core.rowwise.row_function import Rowwise
from lowtide.core.rowwise.variables import Both, Tensors
from lowtide.ops.attention.definition import reference
from lowtide.ops.attention.definition.dropout import column_keys, keep_mask, row_keys
from lowtide.ops.attention.definition.intervals import Intervals, visible
from lowtide.ops.attention.definition.operands import AttentionOptions, Operands, sizes

# A derivative is assumed to hold COPIES copies of a chunk's scores, which may take WORKSPACE bytes
# together. Every chunk has at least one query, even if its copies take more.
WORKSPACE = 64 << 20
COPIES = 12


def attention(operands: Operands, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """Compute the result [B, H, M, E] and the logsumexp [B, H, M], chunk by chunk."""
    B, H, _, M, N, _, _ = sizes(operands)
    query, key, value, bias, first, end, seed = operands
    dtype = operands.sum_dtype
    rows = {"query": query.to(dtype).movedim(2, 0), "first": first, "end": end}
    whole = {"key": key.to(dtype), "value": value.to(dtype)}
    if bias is not None and bias.shape[2] > 1:
        rows["bias"] = bias.movedim(2, 0)
    elif bias is not None:
        whole["bias"] = bias
    if seed is not None:
        rows["row_key"] = row_keys(seed, B, H, M).movedim(2, 0)
        whole["column_key"] = column_keys(seed, N)
    rows = {name: tensor for name, tensor in rows.items() if tensor is not None}

    def chunk(row_tensors: Tensors, whole_tensors: Tensors) -> Both:
        given = dict(zip((*rows, *whole), (*row_tensors, *whole_tensors)))
        bias = given["bias"].movedim(0, 2) if "bias" in rows else given.get("bias")
        shown_mN = keep_BHmN = None
        if "first" in rows:
            shown_mN = visible(Intervals(given["first"], given["end"]), N)
        if "row_key" in rows:
            row_key_BHm1 = given["row_key"].movedim(0, 2)[..., None]
            keep_BHmN = keep_mask(row_key_BHm1, given["column_key"], options.dropout)
        part = Operands(given["query"].movedim(0, 2), given["key"], given["value"], bias)
        out_BHmE, logsumexp_BHm = reference.attend(part, shown_mN, keep_BHmN, options)
        return (out_BHmE.movedim(2, 0), logsumexp_BHm.movedim(2, 0)), ()

    queries = max(1, WORKSPACE // max(1, COPIES * B * H * N * dtype.itemsize))
    rowwise = Rowwise(chunk, len(rows), 2, queries)
    out_MBHE, logsumexp_MBH = rowwise(*rows.values(), *whole.values())
    return out_MBHE.movedim(0, 2).to(query.dtype), logsumexp_MBH.movedim(0, 2)
