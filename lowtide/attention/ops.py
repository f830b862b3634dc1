"""The registered operators: what a graph sees of lowtide's attention. shapes.py says what comes out of them,
without running them; they know no autograd, autograd.py differentiates them.

    attention             the result, and where they are wanted the statistics of each row (problem.py)
    attention_backward    the gradients of query, key, value and bias that are wanted, in this order
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.library import custom_op

from lowtide.attention import engines
from lowtide.attention.problem import Operands, Options
from lowtide.linear_cross_entropy.operands import on_device_of

OPERANDS = "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? first, Tensor? end, Tensor? seed"
OPTIONS = "float scale, float softcap, float dropout, bool rows_first, str backend"


def _operator(name: str, before: str, flags: str) -> Any:
    schema = f"({before}{OPERANDS}, {flags}, {OPTIONS}) -> Tensor[]"
    return custom_op(f"lowtide::{name}", mutates_args=(), schema=schema)


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
    with on_device_of(operands.query):
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
    with on_device_of(operands.query):
        given = (upstream, logsumexp_upstream, out, statistics)
        return engines.backward(operands, Options(*options), wanted, *given)
