"""Launch the Triton kernels of backward.

They compute each score twice, or compute it once and store what is needed of it (strips.py).

Shapes: B batches; H query heads, G key heads, R = H / G; M queries, N keys; E features of values.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.ops.attention.definition.operands import Operands, Options, allocate, is_far
from lowtide.ops.attention.triton_backend.bf16_split import pieces
from lowtide.ops.attention.triton_backend.launch_forward import Kernels, as_pieces
from lowtide.ops.attention.triton_backend.recompute import (
    key_value_gradient_kernel,
    query_gradient_kernel,
    rows_kernel,
)
from lowtide.ops.attention.triton_backend.stored_scores import (
    bias_of_scores_kernel,
    key_value_of_scores_kernel,
    query_of_scores_kernel,
    scores_kernel,
)
from lowtide.ops.attention.triton_backend.strips import Kept, Strip, kept, strips
from lowtide.ops.attention.triton_backend.tile_sizes import cdiv, next_power_of_2

# The arguments that are cut to a strip's batches.
WITH_BATCHES = (
    *("query_ptr", "key_ptr", "value_ptr", "bias_ptr", "row_key_ptr", "upstream_ptr", "rows_ptr"),
    *("bias_sum_ptr", "grad_key_ptr", "grad_value_ptr"),
)


def backward(
    operands: Operands,
    options: Options,
    wanted: Sequence[bool],
    upstream: Tensor,
    logsumexp_upstream: Tensor | None,
    out: Tensor,
    statistics: Tensor,
) -> list[Tensor]:
    """Return the gradients asked for among query, key, value and bias."""
    operands, out = _readable(operands, out)
    kernels = BackwardKernels(operands, options, wanted)
    return kernels.backward(upstream, logsumexp_upstream, out, statistics.contiguous())


def _readable(operands: Operands, out: Tensor) -> tuple[Operands, Tensor]:
    """Copy the saved tensors that the kernels cannot read in their present strides.

    Hooks may bring saved tensors back in other strides.
    """
    matrices = (each.contiguous() if is_far(each) else each for each in (*operands[:3], out))
    query, key, value, out = matrices
    first, end = (None if each is None else each.contiguous() for each in (operands.first, operands.end))
    return operands._replace(query=query, key=key, value=value, first=first, end=end), out


class BackwardKernels(Kernels):
    """Hold one backward call: the arguments of its kernels, and the gradients asked for."""

    def __init__(self, operands: Operands, options: Options, wanted: Sequence[bool]) -> None:
        super().__init__(operands, options)
        self.wanted = wanted

    def backward(
        self,
        upstream: Tensor,
        logsumexp_upstream: Tensor | None,
        out: Tensor,
        statistics: Tensor,
    ) -> list[Tensor]:
        """Return the gradients asked for among query, key, value and bias."""
        B, H, G, M, N, _, E = self.size
        wanted = self.wanted
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
            if bias.shape[2] == 1:  # sums over queries, computed with the gradients of keys
                bias_sum = statistics.new_empty(B, H, 1, N)
            elif bias.shape[3] == 1:
                grad_bias = _bias_of_queries(bias, logsumexp_upstream, statistics)
            else:
                grad_bias = bias_of_scores = bias.new_empty(bias.shape)
        row_first, row_end = self._rows_of_keys()
        given |= {
            "row_first_ptr": row_first, "row_end_ptr": row_end, "bias_sum_ptr": bias_sum,
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
            strip = Strip(0, B, 0, G, 0, N)
            given |= {**self._pieces_of(given, strip), **_of_strip(strip), **self._kept(Kept(), strip)}
            self._key_value_gradient(given, strip, Kept())
        if bias_sum is not None:
            assert bias is not None
            grad_bias = bias_sum.sum_to_size(bias.shape).to(bias.dtype)
        return [each for each in (grad_query, grad_key, grad_value, grad_bias) if each is not None]

    def _query_gradient(self, given: dict[str, Any], grad_query: Tensor) -> None:
        """Compute dq from scores that are computed again."""
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
        """Compute all gradients from what is stored, strip by strip."""
        size, query = self.size, self.operands.query
        count = pieces(query.dtype)
        shared = (False, False) if grad_bias is None else tuple(each == 1 for each in grad_bias.shape[:2])
        found = strips(size, sum(keeps) * query.dtype.itemsize, count if count > 1 else 0, *shared)
        room = query.new_empty(sum(keeps), math.prod(found[0].shape(size)))
        all_of = found[0].batches, found[0].groups
        add = any(share and own < every for share, own, every in zip(shared, all_of, (size.B, size.G)))
        total_bias = grad_bias
        if grad_bias is not None and add:
            own_sum = grad_bias.dtype == torch.float32
            total_bias = grad_bias.zero_() if own_sum else torch.zeros_like(grad_bias, dtype=torch.float32)
        given = {**given, "ADD_BIAS": add}
        for _, of_heads in itertools.groupby(found, key=lambda strip: (strip.first_batch, strip.first_group)):
            self._strips_of_heads(given, list(of_heads), keeps, many, room, grad_query, total_bias)
        if grad_bias is not None and total_bias is not None and total_bias is not grad_bias:
            grad_bias.copy_(total_bias)

    def _strips_of_heads(
        self,
        given: dict[str, Any],
        of_heads: list[Strip],
        keeps: Kept,
        many: bool,
        room: Tensor,
        grad_query: Tensor | None,
        grad_bias: Tensor | None,
    ) -> None:
        """Compute the gradients of some batches and heads, over all their strips of keys."""
        batches = slice(of_heads[0].first_batch, of_heads[0].first_batch + of_heads[0].batches)
        given = {**given, **{name: _of_batches(given[name], batches) for name in WITH_BATCHES}}
        grad_query, grad_bias = _of_batches(grad_query, batches), _of_batches(grad_bias, batches)
        total = own_query = None if grad_query is None else grad_query[:, of_heads[0].heads(self.size)]
        if own_query is not None and len(of_heads) > 1:
            own_sum = own_query.dtype == torch.float32
            total = own_query.zero_() if own_sum else torch.zeros_like(own_query, dtype=torch.float32)
        given = {
            **given, **self._pieces_of(given, of_heads[0]), "grad_query_ptr": total,
            "grad_query_strides": strides_of(total), "ADD": len(of_heads) > 1,
        }  # fmt: skip
        for strip in of_heads:
            given |= {**_of_strip(strip), **self._kept(keeps, strip, room)}
            made_key = False
            if many:
                self._scores(given, strip)
            else:
                made_key = self._key_value_gradient(given, strip, keeps)
            if total is not None:
                self._query_of_scores(given, strip)
            if not made_key and (many or given["grad_key_ptr"] is not None):
                self._key_value_of_scores(given if many else {**given, "grad_value_ptr": None}, strip)
            if grad_bias is not None:
                self._bias_of_scores(given, strip, grad_bias)
        if own_query is not None and total is not None and total is not own_query:
            own_query.copy_(total)

    def _kept(self, keeps: Kept, strip: Strip, room: Tensor | None = None) -> dict[str, Any]:
        """Return where a strip stores its numbers."""
        given: dict[str, Any] = {f"{name}_ptr": None for name in Kept._fields}
        given["grad_scores_strides"] = (0, 0, 0)
        for at, name in enumerate(name for name, keep in keeps._asdict().items() if keep):
            assert room is not None
            shape = strip.shape(self.size)
            tensor = room[at, : math.prod(shape)].view(shape)
            given |= {f"{name}_ptr": tensor, "grad_scores_strides": tensor.stride()}
        return given

    def _pieces_of(self, given: dict[str, Any], strip: Strip) -> dict[str, Any]:
        """Return the pieces of the operands of a strip's heads, and their number.

        With one piece the operands stay as they are, with all heads.
        """
        count = pieces(self.operands.query.dtype)
        if count == 1:
            return {"PIECES": 1}
        keys, queries = slice(strip.first_group, strip.first_group + strip.groups), strip.heads(self.size)
        heads = {"query": queries, "key": keys, "value": keys, "upstream": queries}
        parts = {name: given[f"{name}_ptr"][:, own] for name, own in heads.items()}
        return {"PIECES": count, **as_pieces(parts, count)}

    def _key_value_gradient(self, given: dict[str, Any], strip: Strip, keeps: Kept) -> bool:
        """Compute dv and, if one kernel can, dk; return True if dk is done."""
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
            programs = own["tiles"] * strip.batches * strip.groups, max(blocks_k, blocks_e)
            _launch(key_value_gradient_kernel, programs, own)
        return "value" not in without

    def _scores(self, given: dict[str, Any], strip: Strip) -> None:
        """Store the gradients of a strip's scores, and its weights if they are stored."""
        _, _, G, M, N, _, _ = self.size
        B = strip.batches
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
        """Compute dq from the stored gradients of scores."""
        given = {**given, **self._cut("query of scores", given["PIECES"])}
        given["tiles_m"] = cdiv(self.size.M, given["BLOCK_M"])
        programs = given["tiles_m"] * strip.shape(self.size)[0] * given["BLOCKS_K"]
        _launch(query_of_scores_kernel, (programs,), given)

    def _key_value_of_scores(self, given: dict[str, Any], strip: Strip) -> None:
        """Compute dk and dv, or one of them, from what is stored."""
        given = {**given, **self._cut("key and value of scores", given["PIECES"])}
        blocks = given["BLOCKS_K"] * (given["grad_key_ptr"] is not None)
        blocks += given["BLOCKS_E"] * (given["grad_value_ptr"] is not None)
        programs = cdiv(strip.keys, given["BLOCK_N"]) * strip.batches * strip.groups * blocks
        _launch(key_value_of_scores_kernel, (programs,), given)

    def _bias_of_scores(self, given: dict[str, Any], strip: Strip, grad_bias: Tensor) -> None:
        """Compute the bias's gradient from the stored gradients of scores."""
        size = self._blocks("bias of scores")
        assert size is not None
        all_of = strip.batches, strip.groups * self.size.R
        own = tuple(1 if shared == 1 else count for shared, count in zip(grad_bias.shape, all_of))
        steps = (0 if n == 1 else step for n, step in zip(grad_bias.shape[:2], grad_bias.stride()))
        tiles = cdiv(self.size.M, size.M), cdiv(strip.keys, size.N)
        scores = given["grad_scores_ptr"] if given["grad_z_ptr"] is None else given["grad_z_ptr"]
        given = {
            **given, "grad_scores_ptr": scores, "grad_bias_ptr": grad_bias,
            "grad_bias_strides": (*steps, *grad_bias.stride()[2:]), "own": own, "tile_counts": tiles,
            "loops": (all_of[0] // own[0], all_of[1] // own[1]), "BLOCK_M": size.M, "BLOCK_N": size.N,
            "num_warps": size.warps, "num_stages": size.stages,
        }  # fmt: skip
        _launch(bias_of_scores_kernel, (math.prod(tiles + own),), given)

    def _rows_of_keys(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the interval of queries that see each key, as two vectors [N]."""
        first, end = self.operands.first, self.operands.end
        if first is None or end is None:
            return None, None
        key_N = torch.arange(self.size.N, dtype=torch.int32, device=first.device)
        row_first = torch.searchsorted(end, key_N, right=True, out_int32=True)
        row_end = torch.searchsorted(first, key_N, right=True, out_int32=True)
        return torch.minimum(row_first, row_end), row_end


def _launch(kernel: Any, programs: tuple[int, ...], given: dict[str, Any]) -> None:
    """Launch a kernel with those of the given arguments that it takes, if there are programs."""
    names = {*kernel.arg_names, "num_warps", "num_stages"}
    if math.prod(programs):
        kernel[programs](**{name: each for name, each in given.items() if name in names})


def _of_batches(tensor: Tensor | None, batches: slice) -> Tensor | None:
    """Return a tensor's part of these batches; one that all batches share as it is."""
    return tensor if tensor is None or tensor.shape[0] == 1 else tensor[batches]


def _of_strip(strip: Strip) -> dict[str, int]:
    """Return the arguments that describe a strip."""
    return {
        "B": strip.batches, "first_group": strip.first_group, "groups": strip.groups,
        "first_key": strip.first_key, "end_key": strip.first_key + strip.keys,
    }  # fmt: skip


def _bias_of_queries(bias: Tensor, logsumexp_upstream: Tensor | None, statistics: Tensor) -> Tensor:
    """Return the gradient of a bias that is the same for all keys.

    Such a bias moves the logsumexp of its row, and nothing else.
    """
    if logsumexp_upstream is None:
        return torch.zeros_like(bias)
    moved = logsumexp_upstream.masked_fill(statistics[:, :, -1] == -torch.inf, 0)
    return moved[..., None].sum_to_size(bias.shape).to(bias.dtype)


def strides_of(tensor: Tensor | None) -> tuple[int, ...]:
    """Return a tensor's strides, or zeros for None."""
    return (0, 0, 0, 0) if tensor is None else tensor.stride()
