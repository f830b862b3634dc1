"""Replace F.linear and F.cross_entropy in the caller's own code while a chunk runs.

F.linear          Nearly every head uses it. Autograd computes each chunk's weight gradient in the
                  weight's dtype. In the replacement, the GEMM itself adds to a float32 sum: nothing
                  is rounded, and no chunk allocates a tensor of the weight's size. The sum takes 4
                  bytes per element until the pass over the chunks ends. On the CPU torch has no
                  such GEMM for half precision, so there F.linear of half precision is not replaced.
F.cross_entropy   It is replaced on CUDA for float32 logits, class indices and reduction "sum" or
                  "none". Forward reads the logits once and keeps two numbers per row; torch writes
                  the log-softmax of all logits. Backward reads the logits once and writes their
                  gradient; torch takes three passes.

Both replacements have a second derivative, because head or loss_fn may itself ask for gradients.

F.batch_norm with statistics of its batch is an error, wherever its module comes from.

Shapes: C rows, D features, V classes.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lowtide.core import torch_private
from lowtide.core.checks import HALVES
from lowtide.ops.chunked_loss import validation
from lowtide.ops.chunked_loss.accumulate import Sum, sum_dtype
from lowtide.ops.chunked_loss.functional.tensors import is_plain
from lowtide.ops.chunked_loss.isolation import is_isolated
from lowtide.ops.linear_cross_entropy.engines.formulas.row_math import (
    LogitTransform,
    RowCoefs,
    SoftmaxStats,
    TileColumns,
)

WHOLE_ROWS = TileColumns(0, LogitTransform())


class GradientSumMode(TorchFunctionMode):
    """Make F.linear add the gradients of `parameters` to `sums`; autograd gets None for them."""

    def __init__(self, parameters: Sequence[Tensor] = (), sums: Sequence[Sum | None] = ()) -> None:
        super().__init__()
        self.sums = {id(parameter): total for parameter, total in zip(parameters, sums) if total is not None}
        self.summed: set[int] = set()
        self.casts: dict[tuple[int, torch.dtype], Tensor] = {}
        self.task: int | None = None

    def sums_up(self, parameter: Tensor) -> bool:
        """Return True if an F.linear adds the gradient of this parameter to its sum."""
        return id(parameter) in self.summed

    @contextlib.contextmanager
    def collect(self, value: Tensor) -> Iterator[None]:
        """Let the backward pass from `value` add to the sums.

        In any other backward pass, F.linear returns its gradients to autograd. Other passes are
        those that head or loss_fn runs, even within this pass, and those that measure gradients
        (accumulate.py).
        """

        def enter(_: Any) -> None:
            if self.task is None:
                self.task = torch_private.backward_id()

        handle = None if value.grad_fn is None else value.grad_fn.register_prehook(enter)
        try:
            yield
        finally:
            self.task = None
            if handle is not None:
                handle.remove()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Compiled code has its own backward. A checkpoint inside head runs its function again in
        # backward, where this mode is not active; both runs must execute the same operators.
        if function in (F.linear, F.cross_entropy) and not torch.compiler.is_compiling() and is_isolated():
            own = self._linear if function is F.linear else _cross_entropy
            found = own(*args, **kwargs)
            if found is not None:
                return found
        # F.batch_norm gives `training` by name. nn.SyncBatchNorm, whose statistics are those of all
        # ranks, begins with torch.batch_norm_stats.
        if (function is F.batch_norm and kwargs.get("training")) or function is torch.batch_norm_stats:
            raise validation.batch_statistics()
        return function(*args, **kwargs)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
        """Return F.linear, whose backward adds to the sums, or None if unsupported."""
        total = self.sums.get(id(weight))
        if total is None or weight.dim() != 2 or type(input) is not Tensor or not is_plain(weight):
            return None
        kind = input.device.type
        dtype = input.dtype
        if kind != "meta" and torch.is_autocast_enabled(kind) and torch.float64 not in (dtype, weight.dtype):
            dtype = torch.get_autocast_dtype(kind)
        elif weight.dtype != dtype:
            return None  # let torch raise its own error
        if dtype in HALVES and kind != "cuda":
            return None
        if weight._backward_hooks or (bias is not None and (bias._backward_hooks or bias.dim() != 1)):
            return None  # hooks that head has installed expect gradients from autograd
        own_bias = None if bias is None else self.sums.get(id(bias))
        if bias is not None and own_bias is None and bias.requires_grad:
            return None
        self.summed |= {id(each) for each in (weight, bias) if each is not None}
        cast_VD = self._cast(weight, dtype)
        return SummingLinear.apply(input.to(dtype), weight, bias, cast_VD, total, own_bias, self)

    def _cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weight in this dtype; it is cast once for all chunks, as autocast does."""
        if weight.dtype == dtype:
            return weight.detach()
        if (id(weight), dtype) not in self.casts:
            self.casts[id(weight), dtype] = weight.detach().to(dtype)
        return self.casts[id(weight), dtype]


class SummingLinear(torch.autograd.Function):
    """Compute F.linear with `cast_VD`, which is `weight` in the GEMM's dtype.

    `weight` itself is an input so that it is in the graph.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        cast_VD: Tensor,
        weight_sum: Sum,
        bias_sum: Sum | None,
        operators: GradientSumMode,
    ) -> Tensor:
        ctx.save_for_backward(input, cast_VD, weight)
        ctx.sums, ctx.operators = (weight_sum, bias_sum), operators
        ctx.set_materialize_grads(False)
        return F.linear(input, cast_VD, None if bias is None else bias.to(cast_VD.dtype))

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if upstream is None:
            return (None,) * 7
        input, cast_VD, weight = ctx.saved_tensors
        for_input, for_weight, for_bias = ctx.needs_input_grad[:3]
        g_CV, x_CD = _as_matrix(upstream), _as_matrix(input)
        if ctx.operators.task != torch_private.backward_id():
            grad_input = upstream @ weight.to(upstream.dtype) if for_input else None
            grad_weight = g_CV.t() @ x_CD if for_weight else None
            return grad_input, grad_weight, g_CV.sum(0) if for_bias else None, *(None,) * 4
        weight_sum, bias_sum = ctx.sums
        if for_weight:
            weight_sum.add_product(g_CV, x_CD)
        if for_bias:
            bias_sum.add(g_CV.sum(0, dtype=sum_dtype(g_CV.dtype)))
        return upstream @ cast_VD if for_input else None, *(None,) * 6


def _as_matrix(tensor: Tensor) -> Tensor:
    """Return [..., D] as [C, D]; D may be 0, from which torch cannot infer C."""
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def _cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Return F.cross_entropy, computed in one pass over the logits, or None if unsupported."""
    if any(each is not None for each in (weight, size_average, reduce)) or label_smoothing:
        return None
    if reduction not in ("sum", "none") or type(input) is not Tensor or not runs_fused(input):
        return None
    if input.dtype in HALVES and torch.is_autocast_enabled(input.device.type):
        input = input.float()  # as autocast does
    classes = target.dtype == torch.int64 and target.shape == input.shape[:1]
    if input.dim() != 2 or input.dtype != torch.float32 or input.stride(1) != 1 or not classes:
        return None
    ignored_C = target == ignore_index
    target_C = target.masked_fill(ignored_C, 0)
    # Check the targets on the device, as torch does, so that the host need not wait.
    torch._assert_async(((target_C >= 0) & (target_C < input.shape[1])).all())
    losses_C: Tensor = CrossEntropy.apply(input, target_C, ignored_C)
    return losses_C if reduction == "none" else losses_C.sum()


def runs_fused(logits: Tensor) -> bool:
    """Return True if the logits are on CUDA and Triton is installed."""
    return logits.is_cuda and find_spec("triton") is not None


class CrossEntropy(torch.autograd.Function):
    """Compute the cross-entropy of each row of float32 logits in one pass."""

    @staticmethod
    def forward(ctx: Any, logits_CV: Tensor, target_C: Tensor, ignored_C: Tensor) -> Tensor:
        from lowtide.ops.linear_cross_entropy.engines.logits.softmax_triton import softmax_gradient_into

        max_C, sum_C, nll_C = logits_CV.new_empty((3, len(logits_CV)))
        statistics = SoftmaxStats(max_C, sum_C, nll_C)
        terms = RowCoefs(target_C, ignored_C, max_C, max_C)  # the two max_C are not read
        softmax_gradient_into(None, logits_CV, terms, statistics, WHOLE_ROWS, take_stats=True)
        ctx.save_for_backward(logits_CV, target_C, ignored_C, max_C, sum_C)
        return nll_C.masked_fill(ignored_C, 0)

    @staticmethod
    def backward(ctx: Any, upstream_C: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        from lowtide.ops.linear_cross_entropy.engines.logits.softmax_triton import softmax_gradient_into

        logits_CV, target_C, ignored_C, max_C, sum_C = ctx.saved_tensors
        softmax_coef_C = upstream_C.masked_fill(ignored_C, 0).contiguous()
        if torch.is_grad_enabled():
            gradient_CV = logits_CV.softmax(1) - F.one_hot(target_C, logits_CV.shape[1])
            return gradient_CV * softmax_coef_C[:, None], None, None
        terms = RowCoefs(target_C, ignored_C, softmax_coef_C, softmax_coef_C)
        statistics = SoftmaxStats(max_C, sum_C)
        grad_CV = torch.empty_like(logits_CV)
        softmax_gradient_into(grad_CV, logits_CV, terms, statistics, WHOLE_ROWS, take_stats=False)
        return grad_CV, None, None
