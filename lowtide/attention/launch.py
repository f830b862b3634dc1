"""Launches the Triton kernels: which tiles, how many programs, and the vectors that they read.

Shapes: B batches; H query heads, G key heads; M queries, N keys; K features of queries and keys, E of values.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from lowtide.attention import dropout
from lowtide.attention.backward_kernels import delta_kernel, key_value_gradient_kernel, query_gradient_kernel
from lowtide.attention.bias_kernel import bias_gradient_kernel
from lowtide.attention.chunk import allocate
from lowtide.attention.forward_kernels import forward_kernel
from lowtide.attention.problem import Operands, Options, sizes

# Programs that keep a large card busy; and what the partial sums of a bias's gradient may take.
PROGRAMS, PARTIAL_BYTES = 512, 16 << 20


class Blocks(NamedTuple):
    M: int
    N: int
    K: int
    """Features of queries and keys at a time, at most."""
    E: int
    """Of values."""
    warps: int
    stages: int


def forward_blocks(half: bool, features: int) -> Blocks:
    """By the larger of K and E; "half" are 16-bit operands."""
    if not half:
        if features <= 64:
            return Blocks(128, 64, 64, 64, 8, 3)
        return Blocks(128, 64, 128, 128, 8, 1)
    if features <= 64:
        return Blocks(64, 64, 64, 64, 4, 3)
    if features <= 128:
        return Blocks(128, 64, 128, 128, 8, 3)
    return Blocks(128, 64, 256, 256, 8, 2) if features <= 256 else Blocks(128, 32, 512, 256, 8, 2)


def query_blocks(half: bool, features: int) -> Blocks:
    if not half:
        return Blocks(128, 64, 64, 64, 8, 1) if features <= 64 else Blocks(32, 32, 128, 128, 4, 2)
    if features <= 64:
        return Blocks(64, 64, 64, 64, 4, 3)
    if features <= 128:
        return Blocks(128, 64, 128, 128, 8, 3)
    return Blocks(128, 64, 256, 256, 8, 1) if features <= 256 else Blocks(64, 32, 512, 512, 8, 1)


def key_value_blocks(half: bool, features: int) -> Blocks:
    if not half:
        return Blocks(32, 128, 64, 64, 8, 2) if features <= 64 else Blocks(32, 32, 128, 128, 4, 2)
    if features <= 64:
        return Blocks(64, 64, 64, 64, 4, 3)
    if features <= 128:
        return Blocks(64, 128, 128, 128, 8, 3)
    return Blocks(64, 64, 256, 256, 8, 2) if features <= 256 else Blocks(32, 32, 256, 256, 8, 2)


def bias_blocks(half: bool, features: int) -> Blocks:
    return query_blocks(half, features)._replace(warps=8)


class Kernels:
    def __init__(self, operands: Operands, options: Options) -> None:
        self.operands, self.options = operands, options
        self.size = sizes(operands)
        query, key, value, bias, first, end, seed = operands
        B, H, _, M, N, K, E = self.size
        self.half = query.dtype.itemsize == 2
        row_key = column_key = None
        if seed is not None:
            row_key, column_key = dropout.row_keys(seed, B, H, M), dropout.column_keys(seed, N)
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
        }  # fmt: skip

    def forward(self, keep_logsumexp: bool) -> list[Tensor]:
        B, H, _, M, _, K, E = self.size
        query = self.operands.query
        out = allocate(query, (B, H, M, E), self.options.rows_first)
        logsumexp = query.new_empty(B, H, M, dtype=torch.float32) if keep_logsumexp else None
        blocks = forward_blocks(self.half, max(K, E))
        cut = _cut(K, E, blocks)
        if out.numel():
            tiles = triton.cdiv(M, blocks.M)
            forward_kernel[(tiles * B * H, cut["BLOCKS_E"])](
                **self.tensors, **self.numbers, **cut, tiles=tiles, out_ptr=out, logsumexp_ptr=logsumexp,
                out_strides=out.stride(),
            )  # fmt: skip
        return [out] if logsumexp is None else [out, logsumexp]

    def backward(
        self,
        upstream: Tensor,
        logsumexp_upstream: Tensor | None,
        out: Tensor,
        logsumexp: Tensor,
        wanted: Sequence[bool],
    ) -> list[Tensor]:
        """The gradients of query, key, value and bias that are wanted."""
        B, H, G, M, N, K, E = self.size
        delta = torch.empty_like(logsumexp)
        given = {
            **self.tensors, **self.numbers, "upstream_ptr": upstream, "upstream_strides": upstream.stride(),
            "delta_ptr": delta, "logsumexp_ptr": logsumexp,
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
        delta_kernel[(triton.cdiv(M, 64) * B * H,)](
            out, upstream, logsumexp_upstream, delta, out.stride(), upstream.stride(),
            (0, 0, 0) if logsumexp_upstream is None else logsumexp_upstream.stride(), H, M, E,
            triton.cdiv(M, 64), BLOCK_M=64, BLOCK_E=min(128, max(16, triton.next_power_of_2(E))),
        )  # fmt: skip
        if grad_query is not None:
            self._query_gradient(given, grad_query)
        # A bias that is the same for all queries: the sums over them, where the keys' gradients are made.
        bias = self.operands.bias
        bias_sum = None
        if wanted[3] and bias is not None and bias.shape[2] == 1:
            bias_sum = logsumexp.new_empty(B, H, 1, N)
        if grad_key is not None or grad_value is not None or bias_sum is not None:
            self._key_value_gradient(given, grad_key, grad_value, bias_sum)
        gradients = [grad for grad in (grad_query, grad_key, grad_value) if grad is not None]
        if not wanted[3]:
            return gradients
        assert bias is not None
        if bias_sum is None:
            return [*gradients, self._bias_gradient(given, bias)]
        return [*gradients, bias_sum.sum_to_size(bias.shape).to(bias.dtype)]

    def _query_gradient(self, given: dict[str, Any], grad_query: Tensor) -> None:
        B, H, _, M, _, K, E = self.size
        blocks = query_blocks(self.half, max(K, E))
        cut, tiles = _cut(K, E, blocks), triton.cdiv(M, blocks.M)
        query_gradient_kernel[(tiles * B * H, cut["BLOCKS_K"])](
            **given, **cut, tiles=tiles, grad_query_ptr=grad_query, grad_query_strides=grad_query.stride()
        )

    def _key_value_gradient(
        self,
        given: dict[str, Any],
        grad_key: Tensor | None,
        grad_value: Tensor | None,
        bias_sum: Tensor | None,
    ) -> None:
        B, _, G, _, N, K, E = self.size
        blocks = key_value_blocks(self.half, max(K, E))
        cut, tiles = _cut(K, E, blocks), triton.cdiv(N, blocks.N)
        row_first, row_end = self._rows_of_keys()
        features = max(
            cut["BLOCKS_K"] if grad_key is not None else 1, cut["BLOCKS_E"] if grad_value is not None else 1
        )
        key_value_gradient_kernel[(tiles * B * G, features)](
            **given, **cut, tiles=tiles, row_first_ptr=row_first, row_end_ptr=row_end, bias_sum_ptr=bias_sum,
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
        B, H, _, M, N, K, E = self.size
        blocks = bias_blocks(self.half, max(K, E))
        tiles = (B, H, triton.cdiv(N, blocks.N))
        sizes = bias.shape[0], bias.shape[1], bias.shape[3]
        own = tuple(1 if size == 1 else count for size, count in zip(sizes, tiles))
        loops = tuple(count if size == 1 else 1 for size, count in zip(sizes, tiles))
        programs, steps = math.prod(own) * triton.cdiv(M, blocks.M), math.prod(loops)
        parts = max(1, min(steps, PROGRAMS // programs, PARTIAL_BYTES // (4 * bias.numel())))
        part = bias.new_empty(parts, *bias.shape, dtype=torch.float32)
        bias_gradient_kernel[(programs * parts,)](
            **given, **_cut(K, E, blocks), part_ptr=part, part_strides=part.stride(), own_sizes=own,
            loop_sizes=loops, FULL_N=bias.shape[3] > 1, parts=parts,
        )  # fmt: skip
        return part.sum(0).to(bias.dtype)


def _cut(K: int, E: int, blocks: Blocks) -> dict[str, Any]:
    """The sizes of a kernel's tiles; of features a product takes 16 at the least."""
    block_k = max(16, min(triton.next_power_of_2(K), blocks.K))
    block_e = max(16, min(triton.next_power_of_2(E), blocks.E))
    return {
        "BLOCK_M": blocks.M, "BLOCK_N": blocks.N, "BLOCK_K": block_k, "BLOCKS_K": triton.cdiv(K, block_k),
        "BLOCK_E": block_e, "BLOCKS_E": triton.cdiv(E, block_e), "CUT_K": K % block_k > 0,
        "CUT_E": E % block_e > 0, "num_warps": blocks.warps, "num_stages": blocks.stages,
    }  # fmt: skip


def _strides(tensor: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0, 0) if tensor is None else tensor.stride()


def precision() -> str:
    """Of float32 products: three TF32 products that are as exact, or one where torch is allowed TF32."""
    # Not allow_tf32, which raises once the newer setting has been used.
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"
