"""Launch the Triton kernels: the number of programs, and the arguments that they read.

This file has the launch of forward and what launch_backward.py shares with it. tile_sizes.py has
the tiles.

Shapes: B batches; H query heads, G key heads; M queries, N keys; K features of queries and keys, E
of values.
"""

from typing import Any

import torch
from torch import Tensor

from lowtide.ops.attention.definition import dropout
from lowtide.ops.attention.definition.operands import Operands, Options, allocate, sizes
from lowtide.ops.attention.triton_backend.bf16_split import in_pieces, pieces, precision
from lowtide.ops.attention.triton_backend.dropout import dropout_keys_kernel
from lowtide.ops.attention.triton_backend.forward import forward_kernel
from lowtide.ops.attention.triton_backend.tile_sizes import Blocks, blocks, cdiv, cut, shared_memory

# Dropout keys of a program.
KEYS = 1024


class Kernels:
    """Hold one call and the arguments that all its kernels share."""

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
        """Return dropout's keys, [B, H, M] and [N], int32."""
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

    def _blocks(self, kernel: str, count: int = 1) -> Blocks | None:
        """Return the tile of a kernel whose operands have `count` pieces, or None."""
        kernel = kernel if count == 1 else f"{kernel} of {count} pieces"
        query, size = self.operands.query, self.size
        bias, half = self.operands.bias, query.dtype.itemsize == 2
        row_bias = bias is not None and bias.shape[2] > 1
        return blocks(kernel, half, max(size.K, size.E), shared_memory(query.device), row_bias)

    def _cut(self, kernel: str, count: int = 1) -> dict[str, Any]:
        """Return the arguments for the tile of a kernel that exists."""
        found = self._blocks(kernel, count)
        assert found is not None
        return cut(self.size.K, self.size.E, found)

    def forward(self, keep_statistics: bool) -> list[Tensor]:
        """Return the result and, if asked for, the statistics of each row."""
        B, H, _, M, _, _, E = self.size
        query = self.operands.query
        out = allocate(query, (B, H, M, E), self.options.rows_first)
        statistics = None
        if keep_statistics:
            statistics = query.new_empty(self.operands.statistics_shape, dtype=torch.float32)
        count = pieces(query.dtype)
        given = {**self.tensors, **self.numbers, **self._cut("forward", count)}
        if out.numel():
            if count > 1:
                given |= as_pieces(dict(zip(("query", "key", "value"), self.operands)), count)
            tiles = cdiv(M, given["BLOCK_M"])
            forward_kernel[(tiles * B * H, given["BLOCKS_E"])](
                **given, tiles=tiles, out_ptr=out, statistics_ptr=statistics, out_strides=out.stride(),
                PIECES=count,
            )  # fmt: skip
        return [out] if statistics is None else [out, statistics]


def as_pieces(tensors: dict[str, Tensor], count: int) -> dict[str, Any]:
    """Return the pieces of the tensors as the kernels' arguments."""
    given: dict[str, Any] = {}
    for name, parts in zip(tensors, in_pieces(list(tensors.values()), count)):
        piece_stride, *strides = parts.stride()
        given |= {f"{name}_ptr": parts, f"{name}_strides": (*strides, piece_stride)}
    return given


def forward(operands: Operands, options: Options, keep_statistics: bool) -> list[Tensor]:
    """Return the result and, if asked for, the statistics of each row."""
    return Kernels(operands, options).forward(keep_statistics)
