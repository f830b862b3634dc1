"""Launches the Triton kernels: how many programs, and the vectors that they read (blocks.py has the tiles).

Shapes: B batches; H query heads, G key heads; M queries, N keys; K features of queries and keys, E of values.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from lowtide.attention import dropout
from lowtide.attention.backward_kernels import key_value_gradient_kernel, query_gradient_kernel, rows_kernel
from lowtide.attention.bias_kernel import bias_gradient_kernel
from lowtide.attention.blocks import Blocks, blocks, cdiv, cut, next_power_of_2, shared_memory
from lowtide.attention.chunk import allocate
from lowtide.attention.dropout_kernel import dropout_keys_kernel
from lowtide.attention.forward_kernels import forward_kernel
from lowtide.attention.pieces import in_pieces
from lowtide.attention.problem import Operands, Options, is_far, sizes

# Programs that keep a large card busy; and what the partial sums of a bias's gradient may take.
PROGRAMS, PARTIAL_BYTES = 512, 16 << 20
# Of dropout, a program.
KEYS = 1024


class Kernels:
    def __init__(self, operands: Operands, options: Options) -> None:
        self.operands, self.options = operands, options
        self.size = sizes(operands)
        query, key, value, bias, first, end, seed = operands
        _, H, _, M, N, K, E = self.size
        row_key, column_key = (None, None) if seed is None else self._dropout_keys(seed)
        if bias is not None and bias.dtype == torch.bool:
            bias = bias.view(torch.uint8)
        strides = (0, 0, 0, 0)
        if bias is not None:
            strides = tuple(0 if size == 1 else at for size, at in zip(bias.shape, bias.stride()))  # type: ignore[assignment]
        self.tensors: dict[str, Any] = {
            "query_ptr": query, "key_ptr": key, "value_ptr": value, "bias_ptr": bias, "first_ptr": first,
            "end_ptr": end, "row_key_ptr": row_key, "column_key_ptr": column_key,
            "query_strides": query.stride(), "key_strides": key.stride(), "value_strides": value.stride(),
            "bias_strides": strides,
        }  # fmt: skip
        self.numbers: dict[str, Any] = {
            "H": H, "R": self.size.R, "M": M, "N": N, "K": K, "E": E, "scale": options.scale,
            "limit": dropout.limit(options.dropout) if seed is not None else 0,
            "rescale": dropout.rescale(options.dropout) if seed is not None else 1.0,
            "SOFTCAP": options.softcap, "PRECISION": precision(),
            "BASE_2": not operands.adds_bias,
            "COLUMN_BIAS": bias is not None and bias.shape[2] == 1,
        }  # fmt: skip

    def _dropout_keys(self, seed: Tensor) -> tuple[Tensor, Tensor]:
        """[B, H, M] and [N], int32."""
        B, H, _, M, N, _, _ = self.size
        row_key = torch.empty(B, H, M, dtype=torch.int32, device=seed.device)
        column_key = torch.empty(N, dtype=torch.int32, device=seed.device)
        row_programs = cdiv(B * H * M, KEYS)
        programs = row_programs + cdiv(N, KEYS)
        if programs:
            dropout_keys_kernel[(programs,)](
                seed, row_key, column_key, B * H * M, row_programs, H, M, N, BLOCK=KEYS
            )
        return row_key, column_key

    def _blocks(self, kernel: str) -> Blocks | None:
        query, size = self.operands.query, self.size
        bias, half = self.operands.bias, query.dtype.itemsize == 2
        row_bias = bias is not None and bias.shape[2] > 1
        return blocks(kernel, half, max(size.K, size.E), shared_memory(query.device), row_bias)

    def _cut(self, kernel: str) -> dict[str, Any]:
        found = self._blocks(kernel)
        assert found is not None
        return cut(self.size.K, self.size.E, found)

    def forward(self, keep_statistics: bool) -> list[Tensor]:
        B, H, _, M, _, _, E = self.size
        query = self.operands.query
        out = allocate(query, (B, H, M, E), self.options.rows_first)
        statistics = None
        if keep_statistics:
            statistics = query.new_empty(self.operands.statistics_shape, dtype=torch.float32)
        count = pieces(query.dtype)
        name = "forward" if count == 1 else f"forward of {count} pieces"
        given = {**self.tensors, **self.numbers, **self._cut(name)}
        if out.numel():
            if count > 1:
                given |= self._in_pieces(count)
            tiles = cdiv(M, given["BLOCK_M"])
            forward_kernel[(tiles * B * H, given["BLOCKS_E"])](
                **given, tiles=tiles, out_ptr=out, statistics_ptr=statistics, out_strides=out.stride(),
                PIECES=count,
            )  # fmt: skip
        return [out] if statistics is None else [out, statistics]

    def _in_pieces(self, count: int) -> dict[str, Any]:
        """Query, key and value as forward takes them."""
        given: dict[str, Any] = {}
        for name, parts in zip(("query", "key", "value"), in_pieces(self.operands[:3], count)):
            piece_stride, *strides = parts.stride()
            given |= {f"{name}_ptr": parts, f"{name}_strides": (*strides, piece_stride)}
        return given

    def backward(
        self,
        upstream: Tensor,
        logsumexp_upstream: Tensor | None,
        out: Tensor,
        statistics: Tensor,
        wanted: Sequence[bool],
    ) -> list[Tensor]:
        """The gradients of query, key, value and bias that are wanted."""
        B, H, _, M, N, _, E = self.size
        rows = statistics.new_empty(B, H, 3 if self.operands.adds_bias else 2, M)
        upstream = upstream.contiguous() if is_far(upstream) else upstream
        given = {
            **self.tensors, **self.numbers, "upstream_ptr": upstream, "upstream_strides": upstream.stride(),
            "rows_ptr": rows,
        }  # fmt: skip
        empty = 0 in (B, H, M, N)
        grad_query, grad_key, grad_value = (
            allocate(each, each.shape, self.options.rows_first) if want else None
            for each, want in zip(self.operands[:3], wanted)
        )
        if empty:
            gradients = [grad.zero_() for grad in (grad_query, grad_key, grad_value) if grad is not None]
            bias = self.operands.bias
            return gradients if bias is None or not wanted[3] else [*gradients, torch.zeros_like(bias)]
        rows_kernel[(cdiv(M, 64) * B * H,)](
            out, upstream, logsumexp_upstream, statistics, rows, out.stride(), upstream.stride(),
            (0, 0, 0) if logsumexp_upstream is None else logsumexp_upstream.stride(), H, M, E,
            cdiv(M, 64), self.numbers["BASE_2"], 64, min(128, max(16, next_power_of_2(E))),
        )  # fmt: skip
        if grad_query is not None:
            self._query_gradient(given, grad_query)
        # A bias that is the same for all queries: the sums over them, where the keys' gradients are made.
        bias = self.operands.bias
        bias_sum = None
        if wanted[3] and bias is not None and bias.shape[2] == 1:
            bias_sum = statistics.new_empty(B, H, 1, N)
        if self._blocks("key and value") is not None:
            self._key_value_gradient("key and value", given, grad_key, grad_value, bias_sum)
        else:
            self._key_value_gradient("key", given, grad_key, None, bias_sum)
            self._key_value_gradient("value", given, None, grad_value, None)
        gradients = [grad for grad in (grad_query, grad_key, grad_value) if grad is not None]
        if not wanted[3]:
            return gradients
        assert bias is not None
        if bias_sum is None:
            return [*gradients, self._bias_gradient(given, bias)]
        return [*gradients, bias_sum.sum_to_size(bias.shape).to(bias.dtype)]

    def _query_gradient(self, given: dict[str, Any], grad_query: Tensor) -> None:
        B, H, _, M, _, _, _ = self.size
        given = {**given, **self._cut("query")}
        tiles = cdiv(M, given["BLOCK_M"])
        query_gradient_kernel[(tiles * B * H, given["BLOCKS_K"])](
            **given, tiles=tiles, grad_query_ptr=grad_query, grad_query_strides=grad_query.stride()
        )

    def _key_value_gradient(
        self,
        kernel: str,
        given: dict[str, Any],
        grad_key: Tensor | None,
        grad_value: Tensor | None,
        bias_sum: Tensor | None,
    ) -> None:
        if grad_key is None and grad_value is None and bias_sum is None:
            return
        B, _, G, _, N, _, _ = self.size
        given = {**given, **self._cut(kernel)}
        tiles = cdiv(N, given["BLOCK_N"])
        row_first, row_end = self._rows_of_keys()
        blocks_k, blocks_e = given["BLOCKS_K"], given["BLOCKS_E"]
        features = max(blocks_k if grad_key is not None else 1, blocks_e if grad_value is not None else 1)
        key_value_gradient_kernel[(tiles * B * G, features)](
            **given, tiles=tiles, row_first_ptr=row_first, row_end_ptr=row_end, bias_sum_ptr=bias_sum,
            grad_key_ptr=grad_key, grad_key_strides=_strides(grad_key),
            grad_value_ptr=grad_value, grad_value_strides=_strides(grad_value),
        )  # fmt: skip

    def _rows_of_keys(self) -> tuple[Tensor | None, Tensor | None]:
        """[N] and [N]: the queries that see each key, which are an interval too."""
        first, end = self.operands.first, self.operands.end
        if first is None or end is None:
            return None, None
        key_N = torch.arange(self.size.N, dtype=torch.int32, device=first.device)
        row_first = torch.searchsorted(end, key_N, right=True, out_int32=True)
        row_end = torch.searchsorted(first, key_N, right=True, out_int32=True)
        return torch.minimum(row_first, row_end), row_end

    def _bias_gradient(self, given: dict[str, Any], bias: Tensor) -> Tensor:
        B, H, _, M, N, _, _ = self.size
        given = {**given, **self._cut("bias")}
        tiles = (B, H, cdiv(N, given["BLOCK_N"]))
        sizes = bias.shape[0], bias.shape[1], bias.shape[3]
        own = tuple(1 if size == 1 else count for size, count in zip(sizes, tiles))
        loops = tuple(count if size == 1 else 1 for size, count in zip(sizes, tiles))
        programs, steps = math.prod(own) * cdiv(M, given["BLOCK_M"]), math.prod(loops)
        parts = max(1, min(steps, PROGRAMS // programs, PARTIAL_BYTES // (4 * bias.numel())))
        dtype = bias.dtype if parts == 1 else torch.float32
        part = bias.new_empty(parts, *bias.shape, dtype=dtype)
        bias_gradient_kernel[(programs * parts,)](
            **given, part_ptr=part, part_strides=part.stride(), own_sizes=own, loop_sizes=loops,
            FULL_N=bias.shape[3] > 1, parts=parts,
        )  # fmt: skip
        return part[0] if parts == 1 else part.sum(0).to(bias.dtype)


def _strides(tensor: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0, 0) if tensor is None else tensor.stride()


def pieces(dtype: torch.dtype) -> int:
    """Of each operand of forward: three of float32, whose six products are more exact than one in float32;
    two where torch is allowed TF32, whose three are more exact than one in that."""
    if dtype.itemsize == 2:
        return 1
    return 2 if _allows_tf32() else 3


def precision() -> str:
    """Of float32 products in backward: six products of bfloat16 thirds, more exact than one in float32 and
    faster than three in TF32; or one in TF32 where torch is allowed that."""
    if triton.knobs.runtime.interpret or torch.version.hip is not None:
        return "ieee"
    return "tf32" if _allows_tf32() else "bf16x6"


def _allows_tf32() -> bool:
    # Not allow_tf32, which raises once the newer setting has been used.
    return torch.backends.cuda.matmul.fp32_precision == "tf32"
