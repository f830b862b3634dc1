"""Run the Triton kernels as in an earlier call, by recordings of forward and of backward.

The launchers (triton_backend/) decide by shapes, strides, dtypes and options which kernels run, on
which grids, and with which arguments. A recording (core/recording/recorded.py) repeats the launches
without deciding again. remembered.py says which calls are alike.

Shapes: B batches; H heads; M queries, N keys; K features, E of values.
"""

from typing import Any

import torch
from torch import Tensor

from lowtide.core import torch_private
from lowtide.core.autodiff import in_transform, is_differentiated, scatter_gradients
from lowtide.core.operator import seen_by_nobody
from lowtide.core.recording.recorded import RecordedFunction
from lowtide.core.strides import layouts_of
from lowtide.ops.attention.definition.intervals import Band, Intervals
from lowtide.ops.attention.definition.masks import AttentionBias, Place, intervals, place_of, rows_at
from lowtide.ops.attention.definition.operands import AttentionCall, Operands
from lowtide.ops.attention.operator import ops
from lowtide.ops.attention.operator.autograd import Gradients, differentiable_backward, with_gradients
from lowtide.ops.attention.triton_backend import launch_backward, launch_forward
from lowtide.ops.attention.triton_backend.kernels.bf16_split import piece_count


class RecordedCall:
    """Hold what like calls have in common: everything but their tensors.

    The tensors of these calls are in the caller's layout: [B, M, H, K] if the options say
    `rows_first`, [B, H, M, K] if not.
    """

    def __init__(self, call: AttentionCall) -> None:
        operands, options = call.operands, call.options._replace(backend="triton")
        self.options, self.needs_grad = with_gradients(operands, options)
        self.with_logsumexp, self.dtype = call.with_logsumexp, operands.query.dtype
        self.device = operands.device.type
        self.window: Band | None = call.window
        self.M, self.N = operands.query.shape[2], operands.key.shape[2]
        self.forward = RecordedFunction(self._forward, in_layers=True)
        self.backward = RecordedFunction(self._backward, in_layers=True)

    def run(self, mask: AttentionBias | None, *given: Tensor | None) -> tuple[Tensor, Tensor | None] | None:
        """Return the result and the logsumexp, or None for a call that the operators must run."""
        if torch.is_autocast_enabled(self.device) or in_transform(*given) or not seen_by_nobody(given):
            return None
        # A checkpoint computes a call twice, and the same tensors must be saved each time. A
        # recorded call saves other tensors than the operators, which may have run the first time.
        if torch_private.top_saved_tensors_hooks(True) is not None:
            return None
        if any(self.needs_grad):
            found = attention.apply(self, mask, *given)
            return found if self.with_logsumexp else (found, None)
        out, logsumexp, *_ = self.attend(mask, given)
        assert out is not None
        return out, logsumexp

    def attend(self, mask: AttentionBias | None, given: tuple[Tensor | None, ...]) -> Any:
        """Return the result, the logsumexp or None, and the other tensors that backward needs."""
        assert given[0] is not None
        with torch.cuda.device_of(given[0]):
            seen = intervals(mask, self.window, self.M, self.N, given[0].device)
            vectors = (None, None) if seen is None else seen
            return *self.forward((self._pieces(), seen is None), *given, *vectors), *vectors

    def gradients(self, place: Place, *saved: Tensor | None) -> Any:
        """Return the gradients of the caller's tensors.

        `saved` holds the two upstream gradients and the saved tensors. `place` is where the vectors
        of the mask are kept.
        """
        assert saved[2] is not None
        if not seen_by_nobody(saved):
            return self._backward(*saved, by_operator=True)
        *_, first, end = saved
        with torch.cuda.device_of(saved[2]):
            rows: tuple[Tensor | None, Tensor | None] = None, None
            if first is not None and end is not None:
                rows = rows_at(place, Intervals(first, end), self.N)
            # Hooks on saved tensors may bring these back in another layout.
            return self.backward((self._pieces(), layouts_of(saved)), *saved, *rows)

    def differentiable(
        self, grad_output: Tensor | None, grad_logsumexp: Tensor | None, *saved: Tensor | None
    ) -> Gradients:
        """Return gradients that can be differentiated again."""
        *given, _, _, _, first, end = saved
        upstream = self._turned(grad_output), grad_logsumexp
        operands = self._operands(*given, first, end)
        return self._as_given(differentiable_backward(operands, self.options, self.needs_grad, upstream))

    def _pieces(self) -> int:
        """Return the number of pieces of an operand, which depends on whether torch allows TF32.

        Launches depend on tensors and on this number alone.
        """
        return piece_count(self.dtype)

    def _forward(self, *given: Tensor | None) -> list[Tensor | None]:
        operands = self._operands(*given)
        keep = self.with_logsumexp or any(self.needs_grad)
        out, *kept = launch_forward.forward(operands, self.options, keep)
        statistics, low = (*kept, None, None)[:2]
        logsumexp = kept[0].sum(2) if self.with_logsumexp else None
        return [self._turned(out), logsumexp, statistics, low]

    def _backward(
        self,
        grad_output: Tensor | None,
        grad_logsumexp: Tensor | None,
        query: Tensor | None,
        key: Tensor | None,
        value: Tensor | None,
        bias: Tensor | None,
        out: Tensor | None,
        statistics: Tensor | None,
        low: Tensor | None,
        first: Tensor | None,
        end: Tensor | None,
        *rows: Tensor | None,
        by_operator: bool = False,
    ) -> Gradients:
        operands = self._operands(query, key, value, bias, first, end)
        out = self._turned(out)
        upstream = torch.zeros_like(out) if grad_output is None else self._turned(grad_output)
        kept = upstream, grad_logsumexp, out, statistics, low
        if by_operator:
            found = ops.attention_backward(*kept, *operands, self.needs_grad, *self.options)
        else:
            found = launch_backward.backward(operands, self.options, self.needs_grad, *kept, rows)
        return self._as_given(scatter_gradients(found, self.needs_grad))

    def _operands(self, query: Any, key: Any, value: Any, bias: Any, *rest: Any) -> Operands:
        return Operands(self._turned(query), self._turned(key), self._turned(value), bias, *rest)

    def _turned(self, tensor: Any) -> Any:
        """Return a tensor of the caller's layout in that of the computation, or the reverse."""
        return tensor.transpose(1, 2) if tensor is not None and self.options.rows_first else tensor

    def _as_given(self, gradients: Gradients) -> Gradients:
        query, key, value, bias = gradients
        return self._turned(query), self._turned(key), self._turned(value), bias


class attention(torch.autograd.Function):
    """Define the derivative of a recorded call.

    Profiles name the node after the class, so the class has the operator's name.
    """

    @staticmethod
    def forward(ctx: Any, call: RecordedCall, mask: AttentionBias | None, *given: Tensor | None) -> Any:
        out, logsumexp, *kept = call.attend(mask, given)
        # Not the mask, whose tensor would live as long as the graph.
        ctx.call, ctx.place = call, place_of(mask, call.window, call.M, call.N)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*given, out, *kept)
        return (out, logsumexp) if call.with_logsumexp else out

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_logsumexp: Tensor | None = None) -> Any:  # type: ignore[override]
        call, upstream = ctx.call, (grad_output, grad_logsumexp)
        if grad_output is None and grad_logsumexp is None:
            return (None,) * 6
        saved = upstream + ctx.saved_tensors
        if is_differentiated(*upstream):
            return None, None, *call.differentiable(*saved)
        return None, None, *call.gradients(ctx.place, *saved)
