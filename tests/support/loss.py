"""Inputs, what is tested, and the check against the truth of budgets.py, within its budget.

Everything that is compared is a Result: the loss (or what linear_log_probs gives) and the gradient
of each leaf, by name.

Shapes: N tokens, D features, V classes.
"""

import contextlib
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide
from lowtide.ops.linear_cross_entropy.definition.head import Head, Labels, Options
from lowtide.ops.linear_cross_entropy.operator.arguments import call_of
from lowtide.ops.linear_cross_entropy.operator.planner import make_plan, with_graph_facts
from lowtide.ops.linear_cross_entropy.planning.call import Call
from lowtide.ops.linear_cross_entropy.planning.plan import Plan
from tests.support.budgets import (
    HALVES,
    Inputs,
    Result,
    budget,
    dense,
    dense_log_probs,
    dense_logits,
    differentiate,
    differentiate_log_probs,
    log_prob_magnitudes,
    magnitudes,
    norm,
    row_shares,
)

__all__ = [
    "HALVES",
    "Inputs",
    "Result",
    "budget",
    "call_of_sizes",
    "check",
    "check_argmax",
    "check_log_probs",
    "dense",
    "dense_log_probs",
    "differentiate",
    "differentiate_log_probs",
    "fused",
    "fused_log_probs",
    "interpreted",
    "magnitudes",
    "make_inputs",
    "no_synchronisation",
    "norm",
    "planned",
    "references",
    "references_log_probs",
    "rows_for",
    "skip_unless_runnable",
    "smallest_workspace",
    "workspace_for",
]


def rows_for(device: str, dtype: torch.dtype, few: int = 37) -> int:
    """Enough that two half-precision results, ours and eager's, do not differ by luck."""
    return 370 if device == "cuda" and dtype in HALVES else few


def make_inputs(
    N: int | None = None,
    D: int = 19,
    V: int = 63,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    bias: bool = False,
    class_weight: bool = False,
    probabilities: bool = False,
    logit_scale: bool = False,
    row_weight: bool = False,
    ignored: float = 0.25,
    ignore_index: int = -100,
    scale: float = 2.0,
) -> Inputs:
    """Leaves that require gradients; products of standard deviation `scale`, a share of the rows
    ignored (the class probabilities of such a row are all zero, its weight NaN, that of some others
    0)."""

    N = rows_for(device, dtype) if N is None else N

    def leaf(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape) * scale).to(device, dtype).requires_grad_()

    target = torch.randint(V, (N,))
    target[torch.rand(N) < ignored] = ignore_index
    inputs = Inputs(
        input=leaf(N, D),
        linear_weight=leaf(V, D, scale=scale / D**0.5),
        target=target.to(device),
        linear_bias=leaf(V) if bias else None,
        weight=torch.rand(V).add(0.5).to(device, dtype) if class_weight else None,
    )
    if probabilities:
        target_NV = (3 * torch.randn(N, V)).softmax(1).masked_fill((target == ignore_index)[:, None], 0)
        inputs = replace(inputs, target=target_NV.to(device, dtype))
    if logit_scale:
        inputs = replace(inputs, logit_scale=torch.tensor(0.7).to(device, dtype).requires_grad_())
    if row_weight:
        weight_N = torch.randn(N).masked_fill(torch.rand(N) < 0.2, 0)
        if not probabilities:
            weight_N = weight_N.masked_fill(target == ignore_index, torch.nan)
        inputs = replace(inputs, row_weight=weight_N.to(device, dtype))
    return inputs


def fused(inputs: Inputs, **options: Any) -> Tensor:
    return lowtide.linear_cross_entropy(
        inputs.input,
        inputs.linear_weight,
        inputs.target,
        linear_bias=inputs.linear_bias,
        weight=inputs.weight,
        row_weight=inputs.row_weight,
        **_with_scale(inputs, options),
    )


def fused_log_probs(inputs: Inputs, **options: Any) -> lowtide.LogProbs:
    return lowtide.linear_log_probs(
        inputs.input,
        inputs.linear_weight,
        inputs.target,
        linear_bias=inputs.linear_bias,
        **_with_scale(inputs, options),
    )


def _with_scale(inputs: Inputs, options: dict[str, Any]) -> dict[str, Any]:
    return options if inputs.logit_scale is None else options | {"logit_scale": inputs.logit_scale}


# The check.


def check(
    actual: Result, inputs: Inputs, *, factor: float = 2.0, upstream: Tensor | float = 1.0, **options: Any
) -> None:
    """Every part of `actual` has the right dtype and shape, and an error within its budget."""
    _compare(actual, *references(inputs, upstream, **options), inputs, factor)


def references(
    inputs: Inputs, upstream: Tensor | float = 1.0, **options: Any
) -> tuple[Result, Result, Result]:
    """What a result is held against: the exact one, eager torch's, and magnitudes."""
    upstream = torch.as_tensor(upstream, dtype=inputs.sum_dtype, device=inputs.input.device)
    exact_inputs, eager_inputs = _exact_and_eager(inputs)
    exact = differentiate(dense, exact_inputs, upstream, **options)
    eager = differentiate(dense, eager_inputs, upstream, **options)
    if exact["loss"].dim() == 0:
        # One number can be right by luck. Its rows, all erring to the same side, can not.
        rows = options | {"reduction": "none"}
        error_N = (dense(eager_inputs, **rows).double() - dense(exact_inputs, **rows)).detach()
        share_N = row_shares(exact_inputs, **options).nan_to_num(0)
        eager["loss"] = exact["loss"] + (error_N.nan_to_num(0, 0, 0).abs().flatten() * share_N).sum()
    if exact["loss"].numel() == 1:  # half a unit of its last place is what it rounds by, but for luck
        half_unit = torch.finfo(inputs.sum_dtype).eps / 2 * exact["loss"].abs()
        error = (eager["loss"].double() - exact["loss"]).abs()
        eager["loss"] = exact["loss"] + torch.maximum(error, half_unit)
    if "logit_scale" in exact:
        by_row = (
            differentiate(dense, _scaled_by_row(each), upstream, **options)["logit_scale"].double()
            for each in (eager_inputs, exact_inputs)
        )
        eager["logit_scale"] = eager["logit_scale"] + _sum_of_errors(*by_row)
    return exact, eager, magnitudes(exact_inputs, upstream, **options)


def check_log_probs(
    actual: Result, inputs: Inputs, upstream: Sequence[Tensor | None], *, factor: float = 2.0, **options: Any
) -> None:
    """Likewise; `upstream` of log_prob, entropy and logsumexp."""
    exact, eager, magnitude = references_log_probs(inputs, upstream, **options)
    check_argmax(actual["argmax"], exact.pop("argmax"), inputs, **options)
    actual = {name: part for name, part in actual.items() if name != "argmax"}
    _compare(actual, exact, eager, magnitude, inputs, factor)


def references_log_probs(
    inputs: Inputs, upstream: Sequence[Tensor | None], **options: Any
) -> tuple[Result, Result, Result]:
    """What a result is held against; of argmax only the exact one."""
    exact_inputs, eager_inputs = _exact_and_eager(inputs)
    exact = differentiate_log_probs(dense_log_probs, exact_inputs, upstream, **options)
    eager = differentiate_log_probs(dense_log_probs, eager_inputs, upstream, **options)
    if "logit_scale" in exact:
        by_row = (
            differentiate_log_probs(dense_log_probs, _scaled_by_row(each), upstream, **options)["logit_scale"]
            for each in (eager_inputs, exact_inputs)
        )
        eager["logit_scale"] = eager["logit_scale"] + _sum_of_errors(*by_row)
    return exact, eager, log_prob_magnitudes(exact_inputs, upstream, **options)


def _compare(
    actual: Result, exact: Result, eager: Result, magnitude: Result, inputs: Inputs, factor: float
) -> None:
    assert actual.keys() == exact.keys()
    for name, got in actual.items():
        want, leaf = exact[name], getattr(inputs, name, None)
        dtype = inputs.sum_dtype if leaf is None else leaf.dtype
        assert got.dtype == dtype, f"{name} is {got.dtype}, not {dtype}"
        assert got.shape == want.shape, f"{name} is {list(got.shape)}, not {list(want.shape)}"
        for same in (torch.isnan, torch.isposinf, torch.isneginf):
            assert torch.equal(same(got), same(want)), f"{name}: other elements are {same.__name__[2:]}"
        finite = want.isfinite()
        parts = (part.double().where(finite, 0) for part in (eager[name], want, magnitude[name]))
        allowed = budget(*parts, factor=factor, dtype=inputs.sum_dtype)
        error = norm((got.double() - want).where(finite, 0))
        assert error <= allowed, f"{name}: error {error:.3e} exceeds its budget {allowed:.3e}"


def check_argmax(
    actual: Tensor, exact: Tensor, inputs: Inputs, *, softcap: float | None = None, **options: Any
) -> None:
    """The largest logit, or one that rounding makes as large."""
    assert actual.dtype == torch.int64
    assert actual.shape == exact.shape
    assert torch.equal(actual == -1, exact == -1), "argmax: other rows are ignored"
    chain = {"softcap": softcap, "logit_scale": options.get("logit_scale")}
    exact_NV, eager_NV = (dense_logits(each, **chain).detach() for each in _exact_and_eager(inputs))
    counted_N = exact.reshape(-1) >= 0
    chosen_N1 = actual.reshape(-1, 1)[counted_N]
    gap_N = exact_NV.amax(1)[counted_N] - exact_NV[counted_N].gather(1, chosen_N1)[:, 0]
    allowed = 4 * norm((eager_NV.double() - exact_NV).nan_to_num(0))
    assert (gap_N <= allowed).all(), f"argmax: {gap_N.max():.3e} below the largest, allowed {allowed:.3e}"


def _exact_and_eager(inputs: Inputs) -> tuple[Inputs, Inputs]:
    eager = inputs.to(torch.float32) if inputs.sum_dtype == torch.float64 else inputs
    return inputs.to(torch.float64), eager


def _scaled_by_row(inputs: Inputs) -> Inputs:
    """A scale of its own for each row: one gradient can be right by luck, the rows' cannot."""
    assert inputs.logit_scale is not None
    scale_N1 = inputs.logit_scale.detach().to(inputs.sum_dtype).expand(inputs.leading.numel(), 1).clone()
    return replace(inputs, logit_scale=scale_N1.requires_grad_())


def _sum_of_errors(eager: Tensor, exact: Tensor) -> Tensor:
    return (eager.double() - exact).nan_to_num(0, 0, 0).abs().sum()


# Workspaces.


def smallest_workspace(call: Callable[[int], Any]) -> int:
    """The number of bytes that the error of `call(workspace)` asks for."""
    with pytest.raises(ValueError, match="workspace must") as caught:
        call(0)
    return int(re.search(r"(\d+) bytes", str(caught.value))[1])


def planned(inputs: Inputs, workspace: int | None, *, log_probs: bool = False, **options: Any) -> Plan:
    leaves = [inputs.input, inputs.linear_weight, inputs.linear_bias, getattr(inputs, "logit_scale", None)]
    head = Head((inputs.input,), (inputs.linear_weight,), *leaves[2:])
    x, w, bias, scale = (leaf is not None and leaf.requires_grad for leaf in leaves)
    dtype = options.pop("compute_dtype", inputs.input.dtype)
    given = Options(workspace=workspace, compute_dtype=dtype, **options)
    labels = Labels(inputs.target, inputs.weight)
    return make_plan(with_graph_facts(call_of(head, labels, (x, w, bias, scale), given, log_probs=log_probs)))


def call_of_sizes(
    N: int,
    D: int,
    V: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
    wanted: tuple[bool, bool] = (True, True),
    log_probs: bool = False,
    **options: Any,
) -> Call:
    """A call of tensors of these sizes, for the engine that would run it, in a FakeTensorMode.

    `wanted` says whether the input and the weight get a gradient.
    """
    x, w = (torch.empty(size, D, dtype=dtype, device=device) for size in (N, V))
    labels = Labels(torch.empty(N, dtype=torch.long, device=device))
    given, needs_grad = Options(**{"compute_dtype": dtype} | options), (*wanted, False, False)
    return with_graph_facts(call_of(Head((x,), (w,)), labels, needs_grad, given, log_probs=log_probs))


def workspace_for(inputs: Inputs, accept: Callable[[Plan], bool], **options: Any) -> int:
    """The smallest workspace (within a per cent) whose plan is accepted."""
    low = smallest_workspace(lambda workspace: planned(inputs, workspace, **options))
    high = low + low // 16  # a plan may be that of a narrow range alone
    if accept(planned(inputs, low, **options)):
        return low
    while not accept(planned(inputs, high, **options)):
        low, high = high, high + high // 16
        assert high < 1 << 40, "no workspace gives such a plan"
    while high - low > low // 100:
        middle = (low + high) // 2
        low, high = (low, middle) if accept(planned(inputs, middle, **options)) else (middle, high)
    return high


# Backends.


def interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def skip_unless_runnable(backend: str, device: str, dtype: torch.dtype = torch.float32) -> None:
    if backend != "triton":
        return
    pytest.importorskip("triton")
    if device == "cpu" and not interpreted():
        pytest.skip("on the CPU the kernels run through the interpreter alone")
    if dtype == torch.float64:
        pytest.skip("the kernels sum in float32")


@contextlib.contextmanager
def no_synchronisation(device: str) -> Iterator[None]:
    """On CUDA, waiting for the device is an error."""
    try:
        if device == "cuda":
            torch.cuda.synchronize()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # "a prototype feature"
                torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
