"""Compute what the operator does not support: derivatives of higher order, forward mode, vmap.

The functions here differentiate the definition itself, a chunk of rows at a time
(core/rowwise/). This is exact and takes bounded memory, but it is not fast.

Shapes: N rows, V classes; C rows of a chunk.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.core.autodiff import differentiable_gradients, in_shape, without_autocast
from lowtide.core.rowwise.row_function import Rowwise
from lowtide.core.rowwise.variables import Both, Tensors
from lowtide.ops.distillation import divergences
from lowtide.ops.distillation.heads import DistillationOptions, Heads, Side
from lowtide.ops.linear_cross_entropy.operator import higher_order

# Number of tensors of the size of a chunk's logits that a derivative holds at once.
COPIES = 32
# The tensors that are cut into chunks of rows.
CUT = ("student_input", "teacher_input", "ignored")


def distillation(heads: Heads, options: DistillationOptions) -> Tensor:
    """Compute the definition, a chunk of rows at a time."""
    flat = _flat(heads.detached_teacher(), options)
    present = [place for place, each in enumerate(flat) if each is not None]
    cut = [place for place in present if Heads._fields[place] in CUT]
    order = cut + [place for place in present if place not in cut]

    def chunk(rows: Tensors, whole: Tensors) -> Both:
        given = dict(zip(order, (*rows, *whole)))
        return (_losses(Heads(*(given.get(place) for place in range(len(flat)))), options),), ()

    rows = higher_order.rows_of_copies(
        heads.classes, COPIES, options.sum_dtype, options.workspace, heads.device
    )
    (loss_N,) = Rowwise(chunk, len(cut), 1, rows)(*(flat[place] for place in order))
    return _reduced(loss_N, heads, options)


def gradients(
    heads: Heads, options: DistillationOptions, needs_grad: Sequence[bool], grad_output: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the student's tensors, in a form that can be differentiated."""

    def losses(student: list[Any]) -> Tensors:
        return (distillation(Heads._make((*student, *heads.teacher, heads.ignored)), options),)

    return differentiable_gradients(losses, heads.student, needs_grad, (grad_output,))


def _flat(heads: Heads, options: DistillationOptions) -> Heads:
    """Return the heads with inputs [N, D], in the sum's dtype and with zeros in ignored rows.

    Inputs and weights are first rounded to the dtype of the operands.
    """

    def side(input: Tensor, weight_VD: Tensor, bias_V: Tensor | None, dtype: torch.dtype) -> Side:
        x_ND = input.to(dtype).to(options.sum_dtype).reshape(heads.rows, input.shape[-1])
        if heads.ignored is not None:
            x_ND = x_ND.masked_fill(heads.ignored.reshape(-1, 1), 0)
        exact_VD = weight_VD.to(dtype).to(options.sum_dtype)
        return x_ND, exact_VD, None if bias_V is None else bias_V.to(options.sum_dtype)

    return Heads(
        *side(*heads.student, options.student_dtype),
        *side(*heads.teacher, options.teacher_dtype),
        None if heads.ignored is None else heads.ignored.flatten(),
    )


def _losses(heads: Heads, options: DistillationOptions) -> Tensor:  # [C]
    """Return the divergence of each row of a chunk."""

    def log_probs(side: Side, softcap: float | None) -> Tensor:
        with without_autocast(heads.device):
            logits_CV = F.linear(*side)
        if softcap:
            logits_CV = softcap * torch.tanh(logits_CV / softcap)
        return (logits_CV / options.temperature).log_softmax(1)

    s_CV = log_probs(heads.student, options.student_softcap)
    t_CV = log_probs(heads.teacher, options.teacher_softcap)
    loss_C = divergences.losses(s_CV, t_CV, options.beta)
    return loss_C if heads.ignored is None else loss_C.masked_fill(heads.ignored, 0)


def _reduced(loss_N: Tensor, heads: Heads, options: DistillationOptions) -> Tensor:
    """Reduce the losses of the rows as the options say."""
    if options.reduction == "none":
        return in_shape(loss_N, heads.leading)
    if options.reduction == "sum":
        return loss_N.sum()
    if heads.ignored is None:
        return loss_N.mean()
    # With every row ignored the loss is NaN and the gradients are zero, as in torch.
    kept = (~heads.ignored).sum()
    return (loss_N.sum() / kept.clamp(min=1)).masked_fill(kept == 0, torch.nan)
