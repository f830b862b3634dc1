"""The registered operators: what a graph sees of lowtide's attention. shapes.py says what comes out of them,
without running them; they know no autograd, autograd.py differentiates them.

    attention             the result, and where they are wanted the statistics of each row (problem.py)
    attention_backward    the gradients of query, key, value and bias that are wanted, in this order
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import define, impl

from lowtide.attention import engines
from lowtide.attention.problem import Operands, Options

OPERANDS = "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? first, Tensor? end, Tensor? seed"
OPTIONS = "float scale, float softcap, float dropout, bool rows_first, str backend, bool causal"


def _operator(name: str, before: str, flags: str) -> Callable[[Any], Any]:
    """Not a custom_op, whose wrappers take the host 50 us a call."""
    schema = f"({before}{OPERANDS}, {flags}, {OPTIONS}) -> Tensor[]"
    define(f"lowtide::{name}", schema, tags=(torch.Tag.pt2_compliant_tag,))

    def registered(function: Any) -> Any:
        impl(f"lowtide::{name}", ("cpu", "cuda"), function)
        return getattr(torch.ops.lowtide, name).default

    return registered


def _refuse_derivatives(operands: Operands) -> None:
    tracked = torch.is_grad_enabled()
    if tracked and any(each is not None and each.requires_grad for each in operands.differentiable):
        raise RuntimeError(
            "lowtide::attention has no derivative of its own; call lowtide.memory_efficient_attention, which "
            "has, or this under torch.no_grad()"
        )


@_operator("attention", "", "bool keep_statistics")
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    first: Tensor | None,
    end: Tensor | None,
    seed: Tensor | None,
    keep_statistics: bool,
    *options: Any,
) -> list[Tensor]:
    operands = Operands(query, key, value, bias, first, end, seed)
    _refuse_derivatives(operands)
    return engines.forward(operands, Options(*options), keep_statistics)


@_operator(
    "attention_backward",
    "Tensor upstream, Tensor? logsumexp_upstream, Tensor out, Tensor statistics, ",
    "bool[] wanted",
)
def attention_backward(
    upstream: Tensor,
    logsumexp_upstream: Tensor | None,
    out: Tensor,
    statistics: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    first: Tensor | None,
    end: Tensor | None,
    seed: Tensor | None,
    wanted: Sequence[bool],
    *options: Any,
) -> list[Tensor]:
    operands = Operands(query, key, value, bias, first, end, seed)
    _refuse_derivatives(operands)
    given = (upstream, logsumexp_upstream, out, statistics)
    return engines.backward(operands, Options(*options), wanted, *given)
