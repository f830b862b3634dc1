"""Register the operators that a graph sees of lowtide's attention.

    attention             the result and, if asked for, the statistics of each row (operands.py)
    attention_backward    the gradients asked for among query, key, value and bias, in this order

fake.py says what comes out of them without running them. They know no autograd; autograd.py
differentiates them.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lowtide.core.operator import operator
from lowtide.ops.attention.definition.operands import Operands, Options
from lowtide.ops.attention.operator import backends

OPERANDS = "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? first, Tensor? end, Tensor? seed"
OPTIONS = "float scale, float softcap, float dropout, bool rows_first, str backend, bool causal"


@operator("attention", f"({OPERANDS}, bool keep_statistics, {OPTIONS}) -> Tensor[]")
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
    """Run forward on the backend that the options name."""
    operands = Operands(query, key, value, bias, first, end, seed)
    return backends.forward(operands, Options(*options), keep_statistics)


@operator(
    "attention_backward",
    "(Tensor upstream, Tensor? logsumexp_upstream, Tensor out, Tensor statistics, "
    f"{OPERANDS}, bool[] wanted, {OPTIONS}) -> Tensor[]",
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
    """Run backward on the backend that the options name."""
    operands = Operands(query, key, value, bias, first, end, seed)
    given = (upstream, logsumexp_upstream, out, statistics)
    return backends.backward(operands, Options(*options), wanted, *given)
