"""Inputs, the truth in float64, what eager torch makes of it, and the budget for their distance.

Shapes: N rows, D_s and D_t features of student and teacher, V classes.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.ops.distillation import forward_kl, jensen_shannon, reverse_kl
from tests.support.half_products import WideLinear
from tests.support.loss import budget, norm, rows_for

HALVES = (torch.bfloat16, torch.float16)
DIVERGENCES = ("forward", "reverse", "js 0.5", "js 0.1")
REDUCTIONS = ("mean", "sum", "none")
Result = dict[str, Tensor]


@dataclass(frozen=True)
class Inputs:
    student_input: Tensor
    student_weight: Tensor
    teacher_input: Tensor
    teacher_weight: Tensor
    student_bias: Tensor | None = None
    teacher_bias: Tensor | None = None
    ignored: Tensor | None = None

    def items(self) -> Iterator[tuple[str, Tensor]]:
        each = ((field.name, getattr(self, field.name)) for field in fields(self))
        return ((name, tensor) for name, tensor in each if tensor is not None)

    def leaves(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self.items() if tensor.requires_grad}

    @property
    def leading(self) -> torch.Size:
        return self.student_input.shape[:-1]

    def to(self, dtype: torch.dtype) -> "Inputs":
        return replace(
            self,
            **{
                name: tensor.detach().to(dtype).requires_grad_(tensor.requires_grad)
                for name, tensor in self.items()
                if name != "ignored"
            },
        )


def make_inputs(
    N: int | None = None,
    D_s: int = 19,
    V: int = 63,
    D_t: int = 11,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    bias: bool = False,
    ignored: float = 0.25,
    scale: float = 2.0,
) -> Inputs:
    """Logits of standard deviation `scale` on both sides; a share of the rows ignored."""
    N = rows_for(device, dtype) if N is None else N

    def tensor(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape) * scale).to(device, dtype)

    return Inputs(
        student_input=tensor(N, D_s).requires_grad_(),
        student_weight=tensor(V, D_s, scale=scale / D_s**0.5).requires_grad_(),
        teacher_input=tensor(N, D_t),
        teacher_weight=tensor(V, D_t, scale=scale / D_t**0.5),
        student_bias=tensor(V).requires_grad_() if bias else None,
        teacher_bias=tensor(V) if bias else None,
        ignored=(torch.rand(N) < ignored).to(device) if ignored else None,
    )


def fused(inputs: Inputs, divergence: str, **options: Any) -> Tensor:
    if divergence.startswith("js"):
        return jensen_shannon(**dict(inputs.items()), beta=float(divergence[3:]), **options)
    return {"forward": forward_kl, "reverse": reverse_kl}[divergence](**dict(inputs.items()), **options)


def dense(
    inputs: Inputs,
    divergence: str,
    *,
    temperature: float = 1.0,
    reduction: str = "mean",
    student_softcap: float | None = None,
    teacher_softcap: float | None = None,
    **_: Any,
) -> Tensor:
    """torch's own kl_div of dense logits, which are float32 (float64 for float64)."""
    both = dense_log_probs(inputs, temperature, student_softcap, teacher_softcap)
    s_NV, t_NV = (log_probs.flatten(0, -2) for log_probs in both)
    if divergence.startswith("js"):
        beta = float(divergence[3:])
        m_NV = torch.logaddexp(t_NV + math.log(beta), s_NV + math.log1p(-beta))
        terms_NV = beta * _kl(t_NV, m_NV) + (1 - beta) * _kl(s_NV, m_NV)
    else:
        terms_NV = _kl(t_NV, s_NV) if divergence == "forward" else _kl(s_NV, t_NV)
    loss_N, leading = terms_NV.sum(-1), inputs.student_input.shape[:-1]
    if inputs.ignored is not None:
        loss_N = loss_N.masked_fill(inputs.ignored.flatten(), 0)
    if reduction == "none":
        return loss_N.view(leading)
    counted = loss_N.numel() if inputs.ignored is None else (~inputs.ignored).sum()
    return loss_N.sum() / (counted if reduction == "mean" else 1)


def _kl(p_NV: Tensor, q_NV: Tensor) -> Tensor:
    return F.kl_div(q_NV, p_NV, reduction="none", log_target=True)


def dense_log_probs(
    inputs: Inputs,
    temperature: float,
    student_softcap: float | None = None,
    teacher_softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    def log_probs(input: Tensor, weight_VD: Tensor, bias_V: Tensor | None, softcap: float | None) -> Tensor:
        dtype = torch.promote_types(input.dtype, torch.float32)
        if input.is_cuda and input.dtype in HALVES:
            logits = WideLinear.apply(input.flatten(0, -2), weight_VD, bias_V).view(
                *input.shape[:-1], weight_VD.shape[0]
            )
        else:
            logits = F.linear(
                input.to(dtype), weight_VD.to(dtype), None if bias_V is None else bias_V.to(dtype)
            )
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        return (logits / temperature).log_softmax(-1)

    return (
        log_probs(inputs.student_input, inputs.student_weight, inputs.student_bias, student_softcap),
        log_probs(inputs.teacher_input, inputs.teacher_weight, inputs.teacher_bias, teacher_softcap),
    )


def differentiate(
    loss_of: Callable[..., Tensor],
    inputs: Inputs,
    divergence: str,
    upstream: Tensor | float = 1.0,
    **options: Any,
) -> Result:
    loss, leaves = loss_of(inputs, divergence, **options), inputs.leaves()
    seed = torch.as_tensor(upstream, dtype=loss.dtype, device=loss.device).expand_as(loss)
    gradients = torch.autograd.grad(loss, tuple(leaves.values()), seed)
    return {"loss": loss.detach(), **dict(zip(leaves, gradients))}


def check(
    actual: Result,
    inputs: Inputs,
    divergence: str,
    upstream: Tensor | float = 1.0,
    factor: float = 2.0,
    **options: Any,
) -> None:
    """Every part of `actual` has the right dtype and shape, and an error within its budget."""
    sum_dtype = torch.promote_types(inputs.student_input.dtype, torch.float32)
    exact, eager, magnitude = references(inputs, divergence, upstream, **options)
    assert actual.keys() == exact.keys()
    for name, got in actual.items():
        want, dtype = exact[name], sum_dtype if name == "loss" else getattr(inputs, name).dtype
        assert got.dtype == dtype, f"{name} is {got.dtype}, not {dtype}"
        assert got.shape == want.shape, f"{name} is {list(got.shape)}, not {list(want.shape)}"
        allowed = budget(eager[name], want, magnitude[name], factor=factor, dtype=sum_dtype)
        error = norm(got.double() - want)
        assert error <= allowed, f"{name}: error {error:.3e} exceeds its budget {allowed:.3e}"


def references(
    inputs: Inputs, divergence: str, upstream: Tensor | float = 1.0, **options: Any
) -> tuple[Result, Result, Result]:
    """What a result is held against: the exact one, eager torch's, and magnitudes."""
    exact_inputs = inputs.to(torch.float64)
    eager_inputs = inputs.to(torch.float32) if inputs.student_input.dtype == torch.float64 else inputs
    exact = differentiate(dense, exact_inputs, divergence, upstream, **options)
    eager = differentiate(dense, eager_inputs, divergence, upstream, **options)
    return exact, eager, magnitudes(exact_inputs, divergence, upstream, **options)


@torch.no_grad()
def magnitudes(
    inputs: Inputs,
    divergence: str,
    upstream: Tensor | float,
    temperature: float = 1.0,
    reduction: str = "mean",
    student_softcap: float | None = None,
    teacher_softcap: float | None = None,
    **_: Any,
) -> Result:
    """The loss and its gradients with |.| around every term, so that nothing cancels. (The slope of
    a soft cap, at most 1, is left out.)"""
    both = dense_log_probs(inputs, temperature, student_softcap, teacher_softcap)
    s_NV, t_NV = (log_probs.flatten(0, -2) for log_probs in both)
    both_NV = s_NV.abs() + t_NV.abs()
    loss_N = ((s_NV.exp() + t_NV.exp()) * both_NV).sum(1)
    grad_NV = s_NV.exp() + t_NV.exp()
    if divergence != "forward":
        grad_NV = s_NV.exp() * (both_NV + loss_N[:, None])
    counts_N = torch.ones_like(loss_N) if inputs.ignored is None else 1.0 - inputs.ignored.flatten().double()
    share_N = counts_N / counts_N.sum() if reduction == "mean" else counts_N
    upstream_N = torch.as_tensor(upstream, dtype=loss_N.dtype, device=loss_N.device).abs().flatten()
    grad_NV *= (share_N * upstream_N / temperature)[:, None]
    loss_N = loss_N * share_N
    x_ND = inputs.student_input.flatten(0, -2)
    return {
        "loss": loss_N.view(inputs.student_input.shape[:-1]) if reduction == "none" else loss_N.sum(),
        "student_input": (grad_NV @ inputs.student_weight.abs()).view(inputs.student_input.shape),
        "student_weight": grad_NV.t() @ x_ND.abs(),
        "student_bias": grad_NV.sum(0),
    }


# For tests of the autograd contract.


def gradients(loss: Tensor, inputs: Inputs, **options: Any) -> Result:
    leaves = inputs.leaves()
    return dict(zip(leaves, torch.autograd.grad(loss, tuple(leaves.values()), **options)))


def small(device: str = "cpu", dtype: torch.dtype = torch.float64) -> Inputs:
    return make_inputs(5, 4, 7, 3, device=device, dtype=dtype, bias=True)


def as_function(
    inputs: Inputs, divergence: str, **options: Any
) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """The loss as a function of the student's three tensors, and these tensors."""

    def loss(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return fused(
            replace(inputs, student_input=x, student_weight=w, student_bias=b), divergence, **options
        )

    return loss, tuple(inputs.leaves().values())
