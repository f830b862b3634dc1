"""Add up terms over chunks, and keep float16 gradients in their range.

Half-precision terms are summed in float32.

A float16 gradient that is computed before the loss is scaled loses numbers below 6e-8, and numbers
above 65504 become infinite. So a chunk's backward starts from a power of two (`backward_scale`).
The power brings the largest gradient of head's output near 2^3, as a loss scale does for a mean. It
is smaller if any other float16 gradient would exceed 2^14. The other gradients are those of tensors
within loss_fn, of token tensors, and of learned tensors. A gradient within loss_fn is far larger
than that of head's output if loss_fn multiplies the logits by a small factor. A gradient of a
learned tensor is a sum over the chunk's rows. One backward pass that starts from 1 measures all
gradients; where it rounds float32 gradients to float16, it measures them before. They are divided
by the power once the upstream gradient is known.

Shapes: C rows of a chunk, D features, V classes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.core.autodiff import graph_nodes, is_leaf
from lowtide.core.checks import HALVES
from lowtide.core.kernels.devices import frexp
from lowtide.core.pending_gradient import PendingGradient

EXPONENT = 3  # of the largest gradient of head's output
HIGHEST = 14  # of any float16 gradient; below 2^16, because measured gradients are rounded
BEYOND = 2.0**20  # the assumed size of a gradient that float16 cannot hold
WIDE = (torch.float32, torch.float64)


class Sum:
    """Hold the sum of the terms added so far, without references to them."""

    def __init__(self) -> None:
        self.total: Any = None

    def add(self, term: Any) -> None:
        """Add a tensor or a number."""
        wide = sum_dtype(term.dtype) if isinstance(term, Tensor) else None
        if wide and isinstance(self.total, Tensor) and self.total.is_sparse and not term.is_sparse:
            self.total, term = term.to(wide, copy=True), self.total  # torch adds a sparse one to a dense one
        if self.total is None:
            self.total = term if wide is None else term.to(wide, copy=True)
        elif isinstance(self.total, Tensor) and wide and torch.can_cast(wide, self.total.dtype):
            self._add_in_place(term)
        else:  # a number, or a tensor whose sum needs a wider dtype
            self.total = self.total + (term if wide is None else term.to(wide))

    def _add_in_place(self, term: Tensor) -> None:
        if term.is_sparse:
            self.total.add_(term.to(self.total.dtype))
            return
        if term.is_cuda or term.dtype == self.total.dtype or not term.dim():
            self.total.add_(term)
            return
        # The CPU would convert the whole term at once: add about 2^16 elements at a time.
        rows = max(1, len(term) * 2**16 // max(1, term.numel()))
        for total_rows, term_rows in zip(self.total.split(rows), term.split(rows)):
            total_rows.add_(term_rows)

    def add_product(self, g_CV: Tensor, x_CD: Tensor) -> None:
        """Add the product g_CV^T x_CD, which is float32 for half precision."""
        wide = sum_dtype(g_CV.dtype)
        widen = {} if wide == g_CV.dtype else {"out_dtype": wide}
        if not len(g_CV):  # without rows cuBLAS writes nothing, instead of zeros
            self.add(torch.zeros(g_CV.shape[1], x_CD.shape[1], dtype=wide, device=g_CV.device))
        elif self.total is None:
            self.total = torch.mm(g_CV.t(), x_CD, **widen)
        elif self.total.dtype == wide and not self.total.is_sparse:
            torch.addmm(self.total, g_CV.t(), x_CD, out=self.total, **widen)
        else:
            self.add(torch.mm(g_CV.t(), x_CD, **widen))


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a sum of terms of this dtype."""
    if dtype in HALVES:
        return torch.float32
    return dtype if dtype.is_floating_point or dtype.is_complex else torch.int64


def backward_scale(
    value: Tensor, outputs: Sequence[Tensor], rest: Sequence[Tensor], previous: Tensor, *, retain_graph: bool
) -> Tensor:
    """Return the power of two that backward starts from, for the chunk whose loss is `value`.

    `outputs` are the tensors that head returned, `rest` other tensors whose gradients must be in
    range. If all gradients of the outputs underflow to zero, those that casts rounded to float16
    say how large they are. If these are zero too, start from the previous chunk's power.
    """
    sizes: list[Tensor] = []
    before_casts: list[Tensor] = []

    def note(gradients: Sequence[Tensor | None]) -> None:
        narrow = [each for each in gradients if each is not None and each.dtype == torch.float16]
        sizes.extend(_largest(each).to(value.device) for each in narrow)  # a 0-d one may be on the CPU

    def note_cast(after: Sequence[Tensor | None], before: Sequence[Tensor | None]) -> None:
        if any(each is not None and each.dtype == torch.float16 for each in after):
            wide = [each for each in before if each is not None and each.dtype in WIDE]
            before_casts.extend(_largest(each).to(value.device) for each in wide)

    nodes = [node for node in graph_nodes(value.grad_fn) if not is_leaf(node)]
    hooks = [node.register_prehook(note) for node in nodes]
    hooks += [node.register_hook(note_cast) for node in nodes]
    try:
        ends = [*outputs, *rest]
        found = torch.autograd.grad(value, ends, retain_graph=retain_graph, allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    note(found)
    limit = HIGHEST if value.dtype == torch.float16 else 60
    scale = previous
    of_outputs = [_largest(each) for each in found[: len(outputs)] if each is not None]
    if of_outputs:
        largest = torch.stack(of_outputs).amax()
        if before_casts:
            largest = torch.where(largest > 0, largest, torch.stack(before_casts).amax().nan_to_num(0))
        scale = torch.where(largest > 0, _power(largest, EXPONENT, limit), previous)
    if sizes:
        # NaN comes from infinity times zero, so it is out of range too.
        highest = torch.stack(sizes).nan_to_num(BEYOND, BEYOND).amax()
        scale = torch.where(highest > 0, scale.minimum(_power(highest, HIGHEST, limit)), scale)
    return scale


def may_be_retained(value: Tensor) -> bool:
    """Return False for a graph with compiled code: its backward may free the tensors it reads."""
    return all(type(node).__name__ != "CompiledFunctionBackward" for node in graph_nodes(value.grad_fn))


def _largest(gradient: Tensor) -> Tensor:
    """Return the largest absolute value, in float32."""
    if gradient.is_sparse:
        gradient = gradient.detach().coalesce().values()
    if not gradient.numel():
        return gradient.new_zeros((), dtype=torch.float32)
    gradient = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    return torch.linalg.vector_norm(gradient.detach(), torch.inf, dtype=dtype).float()


def _power(size: Tensor, exponent: int, limit: int) -> Tensor:
    """Return the power of two, from 2^-limit to 2^limit, that brings a size near 2^exponent."""
    _, own = frexp(size.clamp(max=BEYOND))
    return torch.ldexp(torch.ones_like(size), (exponent - own).clamp(-limit, limit))


def rounded(total: Tensor, dtype: torch.dtype, last_scale: Tensor | None) -> PendingGradient:
    """Return a finished sum in its parameter's dtype, with the factor that remains."""
    if total.is_sparse:
        total = total.coalesce()  # before it is rounded
    if last_scale is None:
        return PendingGradient(total if total.dtype == dtype else total.to(dtype))
    if dtype not in HALVES:
        return PendingGradient(total, remaining=1 / last_scale)
    # Bring the largest element near 1 by a power of two, so that half precision can hold the sum.
    _, exponent = frexp(_largest(total))
    center = torch.ldexp(torch.ones_like(last_scale), -exponent.clamp(-100, 100))
    return PendingGradient(total.mul_(center).to(dtype), remaining=1 / (last_scale * center))
