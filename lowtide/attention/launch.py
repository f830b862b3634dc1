"""Launches the Triton kernels: how many programs, and the vectors that they read (blocks.py has the tiles).

Shapes: B batches; H query heads, G key heads; M queries, N keys; K features of queries and keys, E of values.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.attention import dropout
from lowtide.attention.backward_kernels import key_value_gradient_kernel, query_gradient_kernel, rows_kernel
from lowtide.attention.blocks import Blocks, blocks, cdiv, cut, next_power_of_2, shared_memory
from lowtide.attention.chunk import allocate
from lowtide.attention.dropout_kernel import dropout_keys_kernel
from lowtide.attention.forward_kernels import forward_kernel
from lowtide.attention.grad_scores import Kept, Strip, kept, strips
from lowtide.attention.grad_scores_kernels import (
    bias_of_scores_kernel,
    key_value_of_scores_kernel,
    query_of_scores_kernel,
    scores_kernel,
)
from lowtide.attention.pieces import in_pieces, pieces, precision
from lowtide.attention.problem import Operands, Options, is_far, sizes

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

    def _blocks(self, kernel: str, count: int = 1) -> Blocks | None:
        """count: the pieces of its operands."""
        kernel = kernel if count == 1 else f"{kernel} of {count} pieces"
        query, size = self.operands.query, self.size
        bias, half = self.operands.bias, query.dtype.itemsize == 2
        row_bias = bias is not None and bias.shape[2] > 1
        return blocks(kernel, half, max(size.K, size.E), shared_memory(query.device), row_bias)

    def _cut(self, kernel: str, count: int = 1) -> dict[str, Any]:
        found = self._blocks(kernel, count)
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
        given = {**self.tensors, **self.numbers, **self._cut("forward", count)}
        if out.numel():
            if count > 1:
                given |= _in_pieces(dict(zip(("query", "key", "value"), self.operands)), count)
            tiles = cdiv(M, given["BLOCK_M"])
            forward_kernel[(tiles * B * H, given["BLOCKS_E"])](
                **given, tiles=tiles, out_ptr=out, statistics_ptr=statistics, out_strides=out.stride(),
                PIECES=count,
            )  # fmt: skip
        return [out] if statistics is None else [out, statistics]

    def backward(
        self,
        upstream: Tensor,
        logsumexp_upstream: Tensor | None,
        out: Tensor,
        statistics: Tensor,
        wanted: Sequence[bool],
    ) -> list[Tensor]:
        """The gradients of query, key, value and bias that are wanted."""
        B, H, G, M, N, _, E = self.size
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
        bias, grad_bias, bias_of_scores, bias_sum = self.operands.bias, None, None, None
        if wanted[3] and bias is not None:
            if bias.shape[2] == 1:  # the sums over queries, where the keys' gradients are made
                bias_sum = statistics.new_empty(B, H, 1, N)
            elif bias.shape[3] == 1:
                grad_bias = _bias_of_queries(bias, logsumexp_upstream, statistics)
            else:
                grad_bias = bias_of_scores = bias.new_empty(bias.shape)
        row_first, row_end = self._rows_of_keys()
        given |= {
            "B": B, "row_first_ptr": row_first, "row_end_ptr": row_end, "bias_sum_ptr": bias_sum,
            "grad_key_ptr": grad_key, "grad_key_strides": strides_of(grad_key),
            "grad_value_ptr": grad_value, "grad_value_strides": strides_of(grad_value),
        }  # fmt: skip
        many = self._blocks("query") is None
        together = self._blocks("key and value", pieces(upstream.dtype)) is not None
        keeps = kept(self.operands, self.options, wanted, together, many)
        if many or any(keeps):
            self._in_strips(given, keeps, many, grad_query, bias_of_scores)
        else:
            if grad_query is not None:
                self._query_gradient(given, grad_query)
            strip = Strip(0, G, 0, N)
            given |= {**self._pieces_of(strip, upstream), **_of_strip(strip), **self._kept(Kept(), strip)}
            self._key_value_gradient(given, strip, Kept())
        if bias_sum is not None:
            assert bias is not None
            grad_bias = bias_sum.sum_to_size(bias.shape).to(bias.dtype)
        return [each for each in (grad_query, grad_key, grad_value, grad_bias) if each is not None]

    def _query_gradient(self, given: dict[str, Any], grad_query: Tensor) -> None:
        B, H, _, M, _, _, _ = self.size
        given = {**given, **self._cut("query"), "grad_query_ptr": grad_query}
        given |= {"grad_query_strides": grad_query.stride(), "tiles": cdiv(M, given["BLOCK_M"])}
        _launch(query_gradient_kernel, (given["tiles"] * B * H, given["BLOCKS_K"]), given)

    def _in_strips(
        self,
        given: dict[str, Any],
        keeps: Kept,
        many: bool,
        grad_query: Tensor | None,
        grad_bias: Tensor | None,
    ) -> None:
        """All gradients, by way of what is kept."""
        size, query, upstream = self.size, self.operands.query, given["upstream_ptr"]
        count = pieces(query.dtype)
        shared_heads = grad_bias is not None and grad_bias.shape[1] == 1
        cut_operands = count if count > 1 else 0
        found = strips(size, sum(keeps) * query.dtype.itemsize, cut_operands, shared_heads)
        total, whole = grad_query, found[0].keys == size.N
        if grad_query is not None and not whole:
            own_sum = query.dtype == torch.float32
            total = grad_query.zero_() if own_sum else torch.zeros_like(grad_query, dtype=torch.float32)
        given |= {"grad_query_ptr": total, "grad_query_strides": strides_of(total), "ADD": not whole}
        room = query.new_empty(sum(keeps), math.prod(found[0].shape(size)))
        own = given
        for strip in found:
            if strip.first_key == 0:
                own = given  # without the pieces of other heads, whose memory the next take
                own = {**given, **self._pieces_of(strip, upstream)}
            own |= {**_of_strip(strip), **self._kept(keeps, strip, room)}
            made_key = False
            if many:
                self._scores(own, strip)
            else:
                made_key = self._key_value_gradient(own, strip, keeps)
            if total is not None:
                self._query_of_scores(own, strip)
            if not made_key and (many or own["grad_key_ptr"] is not None):
                self._key_value_of_scores(own if many else {**own, "grad_value_ptr": None}, strip)
            if grad_bias is not None:
                self._bias_of_scores(own, strip, grad_bias)
        if grad_query is not None and total is not None and total is not grad_query:
            grad_query.copy_(total)

    def _kept(self, keeps: Kept, strip: Strip, room: Tensor | None = None) -> dict[str, Any]:
        """The places of what a strip keeps."""
        given: dict[str, Any] = {f"{name}_ptr": None for name in Kept._fields}
        given["grad_scores_strides"] = (0, 0, 0)
        for at, name in enumerate(name for name, keep in keeps._asdict().items() if keep):
            assert room is not None
            shape = strip.shape(self.size)
            tensor = room[at, : math.prod(shape)].view(shape)
            given |= {f"{name}_ptr": tensor, "grad_scores_strides": tensor.stride()}
        return given

    def _pieces_of(self, strip: Strip, upstream: Tensor) -> dict[str, Any]:
        """The operands of a strip's heads, and how many pieces they are in; of one, all heads are there."""
        count = pieces(upstream.dtype)
        if count == 1:
            return {"PIECES": 1}
        keys = slice(strip.first_group, strip.first_group + strip.groups)
        queries = slice(keys.start * self.size.R, keys.stop * self.size.R)
        query, key, value = self.operands[:3]
        parts = {"query": query[:, queries], "key": key[:, keys], "value": value[:, keys]}
        return {"PIECES": count, **_in_pieces({**parts, "upstream": upstream[:, queries]}, count)}

    def _key_value_gradient(self, given: dict[str, Any], strip: Strip, keeps: Kept) -> bool:
        """Whether that of the key too."""
        count = given["PIECES"]
        without: dict[str, tuple[str, ...]] = {"value": ("grad_key_ptr",)}
        if self._blocks("key and value", count) is not None:
            without = {"key and value": ()}
        elif count == 1 and not any(keeps):
            without = {"key": ("grad_value_ptr",), "value": ("grad_key_ptr", "bias_sum_ptr")}
        results = ("grad_key_ptr", "grad_value_ptr", "bias_sum_ptr", "grad_scores_ptr", "grad_z_ptr")
        for kernel, names in without.items():
            own = {**given, **self._cut(kernel, count), **dict.fromkeys(names)}
            if all(own[name] is None for name in results):
                continue
            own["tiles"] = cdiv(strip.keys, own["BLOCK_N"])
            blocks_k = own["BLOCKS_K"] if own["grad_key_ptr"] is not None else 1
            blocks_e = own["BLOCKS_E"] if own["grad_value_ptr"] is not None else 1
            programs = own["tiles"] * self.size.B * strip.groups, max(blocks_k, blocks_e)
            _launch(key_value_gradient_kernel, programs, own)
        return "value" not in without

    def _scores(self, given: dict[str, Any], strip: Strip) -> None:
        B, _, G, M, N, _, _ = self.size
        given = {**given, **self._cut("scores")}
        heads, R, bias_sum = B * strip.groups * self.size.R, self.size.R, given["bias_sum_ptr"]
        tiles_m, tiles_n = cdiv(M, given["BLOCK_M"]), cdiv(strip.keys, given["BLOCK_N"])
        given |= {"tiles_m": tiles_m, "tiles_n": tiles_n}
        if bias_sum is not None:
            part = bias_sum.new_zeros(heads, tiles_m, tiles_n * given["BLOCK_N"])
            given["bias_sum_ptr"] = part
        _launch(scores_kernel, (heads * tiles_m * tiles_n,), given)
        if bias_sum is not None:
            groups = slice(strip.first_group, strip.first_group + strip.groups)
            keys = slice(strip.first_key, strip.first_key + strip.keys)
            sums = part.sum(1)[:, : strip.keys].view(strip.groups, B, R, strip.keys)
            bias_sum.view(B, G, R, N)[:, groups, :, keys] = sums.transpose(0, 1)

    def _query_of_scores(self, given: dict[str, Any], strip: Strip) -> None:
        given = {**given, **self._cut("query of scores", given["PIECES"])}
        given["tiles_m"] = cdiv(self.size.M, given["BLOCK_M"])
        programs = given["tiles_m"] * strip.shape(self.size)[0] * given["BLOCKS_K"]
        _launch(query_of_scores_kernel, (programs,), given)

    def _key_value_of_scores(self, given: dict[str, Any], strip: Strip) -> None:
        given = {**given, **self._cut("key and value of scores", given["PIECES"])}
        blocks = given["BLOCKS_K"] * (given["grad_key_ptr"] is not None)
        blocks += given["BLOCKS_E"] * (given["grad_value_ptr"] is not None)
        programs = cdiv(strip.keys, given["BLOCK_N"]) * self.size.B * strip.groups * blocks
        _launch(key_value_of_scores_kernel, (programs,), given)

    def _bias_of_scores(self, given: dict[str, Any], strip: Strip, grad_bias: Tensor) -> None:
        size = self._blocks("bias of scores")
        assert size is not None
        all_of = self.size.B, strip.groups * self.size.R
        own = tuple(1 if shared == 1 else count for shared, count in zip(grad_bias.shape, all_of))
        tiles = cdiv(self.size.M, size.M), cdiv(strip.keys, size.N)
        scores = given["grad_scores_ptr"] if given["grad_z_ptr"] is None else given["grad_z_ptr"]
        given = {
            **given, "grad_scores_ptr": scores, "grad_bias_ptr": grad_bias,
            "grad_bias_strides": grad_bias.stride(), "own": own, "tile_counts": tiles,
            "loops": (all_of[0] // own[0], all_of[1] // own[1]), "BLOCK_M": size.M, "BLOCK_N": size.N,
            "num_warps": size.warps, "num_stages": size.stages,
        }  # fmt: skip
        _launch(bias_of_scores_kernel, (math.prod(tiles + own),), given)

    def _rows_of_keys(self) -> tuple[Tensor | None, Tensor | None]:
        """[N] and [N]: the queries that see each key, which are an interval too."""
        first, end = self.operands.first, self.operands.end
        if first is None or end is None:
            return None, None
        key_N = torch.arange(self.size.N, dtype=torch.int32, device=first.device)
        row_first = torch.searchsorted(end, key_N, right=True, out_int32=True)
        row_end = torch.searchsorted(first, key_N, right=True, out_int32=True)
        return torch.minimum(row_first, row_end), row_end


def _launch(kernel: Any, programs: tuple[int, ...], given: dict[str, Any]) -> None:
    """given: what kernels take, by name, and more."""
    names = {*kernel.arg_names, "num_warps", "num_stages"}
    if math.prod(programs):
        kernel[programs](**{name: each for name, each in given.items() if name in names})


def _of_strip(strip: Strip) -> dict[str, int]:
    return {
        "first_group": strip.first_group, "groups": strip.groups, "first_key": strip.first_key,
        "end_key": strip.first_key + strip.keys,
    }  # fmt: skip


def _bias_of_queries(bias: Tensor, logsumexp_upstream: Tensor | None, statistics: Tensor) -> Tensor:
    """Of one that is the same for all keys, which moves the logsumexp of its row, and nothing else."""
    if logsumexp_upstream is None:
        return torch.zeros_like(bias)
    moved = logsumexp_upstream.masked_fill(statistics[:, :, -1] == -torch.inf, 0)
    return moved[..., None].sum_to_size(bias.shape).to(bias.dtype)


def _in_pieces(tensors: dict[str, Tensor], count: int) -> dict[str, Any]:
    """As the kernels take them."""
    given: dict[str, Any] = {}
    for name, parts in zip(tensors, in_pieces(list(tensors.values()), count)):
        piece_stride, *strides = parts.stride()
        given |= {f"{name}_ptr": parts, f"{name}_strides": (*strides, piece_stride)}
    return given


def strides_of(tensor: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0, 0) if tensor is None else tensor.stride()
