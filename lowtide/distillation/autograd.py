"""The differentiable op. One registered operator does it all; what backward needs depends on the reduction:

mean, sum   One number multiplies every row's gradient, so forward forms the gradients while it holds each
            chunk of logits. Backward multiplies them by the upstream gradient: in place where the graph is
            freed behind it, out of place where the caller retains it (or a compiler decides).
none        Every row has its own upstream gradient: backward calls the operator again with it.

Derivatives of higher order, and upstream gradients that a transform batches, differentiate the definition.
"""

from typing import Any

import torch
from torch import Tensor

from lowtide.distillation import transforms
from lowtide.distillation.engine import distill
from lowtide.distillation.heads import Heads, Options
from lowtide.linear_cross_entropy.scaling import scale_into


def distillation(heads: Heads, options: Options) -> Tensor:
    wanted = [torch.is_grad_enabled() and each is not None and each.requires_grad for each in heads.student]
    if any(wanted):
        loss: Tensor = _Distillation.apply(options, wanted, *heads)
        return loss
    return _operator(heads, options, wanted, None)[0]


class _Distillation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: Options, wanted: list[bool], *tensors: Tensor | None) -> Tensor:
        heads = Heads(*tensors)
        ctx.options = options
        ctx.set_materialize_grads(False)
        if options.reduction == "none":
            ctx.save_for_backward(*tensors)
            return _operator(heads, options, [False] * 3, None)[0]
        loss, *gradients, scale = _operator(heads, options, wanted, None)
        ctx.save_for_backward(*tensors, *gradients, scale)
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        options, wanted = ctx.options, list(ctx.needs_input_grad[2:5])
        if upstream is None:
            return (None,) * 9
        saved = ctx.saved_tensors
        heads, formed = Heads(*saved[:7]), saved[7:]
        if torch.is_grad_enabled() or transforms.active(upstream):
            gradients = transforms.gradients(heads, options, wanted, upstream)
        elif options.reduction == "none":
            _, *formed, scale = _operator(heads, options, wanted, upstream)
            gradients = _finished(heads, wanted, formed, scale, mine=True)
        else:
            *formed, scale = formed
            mine = not torch.compiler.is_compiling() and not _graph_is_kept()
            gradients = _finished(heads, wanted, formed, scale * upstream, mine=mine)
        return (None, None, *gradients, None, None, None, None)


def _finished(
    heads: Heads, wanted: list[bool], formed: list[Tensor], scale: Tensor, *, mine: bool
) -> list[Tensor | None]:
    """`mine`: what is formed is read by nobody else, and may be changed."""
    scales = (scale[0], scale[1], scale[1])
    return [
        _scaled(tensor, scale, leaf.dtype, mine) if asked and leaf is not None else None
        for leaf, asked, tensor, scale in zip(heads.student, wanted, formed, scales)
    ]


def _scaled(tensor: Tensor, scale: Tensor, dtype: torch.dtype, mine: bool) -> Tensor:
    if not mine or torch.compiler.is_compiling() or tensor.dtype != dtype:
        return _scaled_operator(tensor, scale, dtype)
    _scale_rows(tensor, tensor, scale)
    return tensor


def _scale_rows(out: Tensor, tensor: Tensor, scale: Tensor) -> None:
    if tensor.dim() > 2:  # it is taken a row at a time, where a row is small
        out, tensor = out.flatten(0, -2), tensor.flatten(0, -2)
    scale_into(out, tensor, scale, "torch")


def _graph_is_kept() -> bool:
    kept: bool = torch._C._autograd._get_current_graph_task_keep_graph()
    return kept


# The registered operators. Sizes of chunks are chosen inside, so that no length compiles anew.


def _operator(
    heads: Heads, options: Options, wanted: list[bool], upstream: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _distillation(*heads, upstream, wanted, *options)


@torch.library.custom_op("lowtide::distillation", mutates_args=())
def _distillation(
    student_input: Tensor,
    student_weight: Tensor,
    student_bias: Tensor | None,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor | None,
    ignored: Tensor | None,
    upstream: Tensor | None,
    wanted: list[bool],
    beta: float,
    temperature: float,
    reduction: str,
    student_dtype: torch.dtype,
    teacher_dtype: torch.dtype,
    workspace: int | None,
    student_softcap: float,
    teacher_softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    heads = Heads(
        student_input, student_weight, student_bias, teacher_input, teacher_weight, teacher_bias, ignored
    )
    options = Options(
        beta,
        temperature,
        reduction,
        student_dtype,
        teacher_dtype,
        workspace,
        student_softcap,
        teacher_softcap,
    )
    with torch.autocast(heads.device.type, enabled=False), torch.no_grad():
        return tuple(distill(heads, options, wanted, upstream))


@_distillation.register_fake
def _(
    student_input: Tensor,
    student_weight: Tensor,
    student_bias: Tensor | None,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor | None,
    ignored: Tensor | None,
    upstream: Tensor | None,
    wanted: list[bool],
    beta: float,
    temperature: float,
    reduction: str,
    student_dtype: torch.dtype,
    teacher_dtype: torch.dtype,
    workspace: int | None,
    student_softcap: float,
    teacher_softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    sum_dtype = torch.promote_types(student_dtype, torch.float32)

    def new(asked: bool, like: Tensor, dtype: torch.dtype) -> Tensor:
        return like.new_empty(like.shape if asked else (0,), dtype=dtype)

    loss = student_input.new_empty(student_input.shape[:-1] if reduction == "none" else (), dtype=sum_dtype)
    return (
        loss,
        new(wanted[0], student_input, student_input.dtype if wanted[0] else sum_dtype),
        new(wanted[1], student_weight, sum_dtype),
        new(wanted[2], student_weight[:, 0], sum_dtype),
        loss.new_empty(2),
    )


@torch.library.custom_op("lowtide::distillation_scaled", mutates_args=())
def _scaled_operator(tensor: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
    _scale_rows(out, tensor, scale)
    return out


@_scaled_operator.register_fake
def _(tensor: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.new_empty(tensor.shape, dtype=dtype)
