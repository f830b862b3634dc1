"""Sums over chunks: in float32 where the terms are half precision, so that no chunk is rounded into the sum.

The gradient of a half-precision weight is rounded before: autograd gives each chunk's in the weight's
dtype. Of F.linear, which nearly every head is made of, Products takes it over: the product itself adds to
the float32 sum, nothing is rounded, and no tensor of the weight's size is made for a chunk. It costs those
4 bytes an element of the weight until forward ends. On the CPU there is no such product for half
precision, and sums are all that float32 is used for.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lowtide.chunked_loss.replay import is_ours

HALVES = (torch.float16, torch.bfloat16)


class Sum:
    """What is added to it, without holding on to any of it."""

    def __init__(self) -> None:
        self.total: Any = None

    def add(self, term: Any) -> None:
        if not isinstance(term, Tensor):
            self.total = term if self.total is None else self.total + term
        elif self.total is None:
            self.total = term.to(sum_dtype(term.dtype), copy=True)
        else:
            add(self.total, term)

    def add_product(self, g_CV: Tensor, x_CD: Tensor) -> None:
        """g_CV^T x_CD, as float32 from half precision."""
        wide = sum_dtype(g_CV.dtype)
        widen = {} if wide == g_CV.dtype else {"out_dtype": wide}
        if not len(g_CV):  # of which cuBLAS makes nothing, not zeros
            self.add(torch.zeros(g_CV.shape[1], x_CD.shape[1], dtype=wide, device=g_CV.device))
        elif self.total is None:
            self.total = torch.mm(g_CV.t(), x_CD, **widen)
        elif self.total.dtype == wide:
            torch.addmm(self.total, g_CV.t(), x_CD, out=self.total, **widen)
        else:
            self.add(torch.mm(g_CV.t(), x_CD, **widen))


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype in HALVES:
        return torch.float32
    return torch.int64 if dtype == torch.bool else dtype


def add(total: Tensor, term: Tensor) -> None:
    """total += term"""
    if term.is_cuda or term.dtype == total.dtype or not term.dim():
        total.add_(term)
        return
    rows = max(1, len(term) * 2**16 // max(1, term.numel()))  # the CPU would convert the whole term at once
    for total_rows, term_rows in zip(total.split(rows), term.split(rows)):
        total_rows.add_(term_rows)


class Products(TorchFunctionMode):
    """Within, F.linear adds the gradients of these parameters to these sums, and autograd gives none."""

    def __init__(self, parameters: Sequence[Tensor], sums: Sequence[Sum | None]) -> None:
        super().__init__()
        self.sums = {id(parameter): total for parameter, total in zip(parameters, sums) if total is not None}
        self.casts: dict[tuple[int, torch.dtype], Tensor] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Compiled code has its own backward.
        if function is F.linear and not kwargs and len(args) > 1 and not torch.compiler.is_compiling():
            found = self._linear(*args)
            if found is not None:
                return found
        return function(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
        total = self.sums.get(id(weight))
        # A checkpoint inside the head runs again in backward, where no mode is active: it must look the same.
        if not is_ours():
            return None
        if total is None or weight.dim() != 2 or type(input) is not Tensor or type(weight) is not Tensor:
            return None
        kind = input.device.type
        dtype = input.dtype
        if torch.is_autocast_enabled(kind) and torch.float64 not in (dtype, weight.dtype):
            dtype = torch.get_autocast_dtype(kind)
        elif weight.dtype != dtype:
            return None  # torch's own error
        if dtype in HALVES and kind != "cuda":
            return None
        own_bias = None if bias is None else self.sums.get(id(bias))
        if bias is not None and own_bias is None and bias.requires_grad:
            return None
        return _Linear.apply(input.to(dtype), weight, bias, self._cast(weight, dtype), total, own_bias)

    def _cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Once for all chunks, as autocast's own cache would."""
        if weight.dtype == dtype:
            return weight.detach()
        if (id(weight), dtype) not in self.casts:
            self.casts[id(weight), dtype] = weight.detach().to(dtype)
        return self.casts[id(weight), dtype]


class _Linear(torch.autograd.Function):
    """F.linear; `weight` and `bias` are inputs for the sake of the graph alone."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        cast_VD: Tensor,
        weight_sum: Sum,
        bias_sum: Sum | None,
    ) -> Tensor:
        ctx.save_for_backward(input, cast_VD)
        ctx.sums = weight_sum, bias_sum
        ctx.set_materialize_grads(False)
        return F.linear(input, cast_VD, None if bias is None else bias.to(cast_VD.dtype))

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if upstream is None:
            return (None,) * 6
        input, cast_VD = ctx.saved_tensors
        weight_sum, bias_sum = ctx.sums
        g_CV = upstream.reshape(-1, upstream.shape[-1])
        if ctx.needs_input_grad[1]:
            weight_sum.add_product(g_CV, input.reshape(-1, input.shape[-1]))
        if bias_sum is not None and ctx.needs_input_grad[2]:
            bias_sum.add(g_CV.sum(0, dtype=sum_dtype(g_CV.dtype)))
        grad_input = upstream @ cast_VD if ctx.needs_input_grad[0] else None
        return grad_input, None, None, None, None, None
