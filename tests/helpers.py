"""Inputs, the truth in float64, what eager torch makes of it, and the budget for an error between the two.

Everything that is compared is a Result: the loss and the gradient of each leaf, by name.

Shapes: N tokens, D features, V classes.
"""

import contextlib
import os
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lowtide
from lowtide.linear_cross_entropy.plan import Plan, make_plan

HALVES = (torch.bfloat16, torch.float16)
Result = dict[str, Tensor]


@dataclass(frozen=True)
class Inputs:
    input: Tensor  # [..., D]
    linear_weight: Tensor  # [V, D]
    target: Tensor  # [...]
    linear_bias: Tensor | None = None  # [V]
    weight: Tensor | None = None  # [V]

    def leaves(self) -> dict[str, Tensor]:
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: t for name, t in tensors.items() if t is not None and t.requires_grad}

    def to(self, dtype: torch.dtype) -> "Inputs":
        """New leaves with the same values; the target is left as it is."""
        changed = {}
        for name in ("input", "linear_weight", "linear_bias", "weight"):
            tensor = getattr(self, name)
            if tensor is not None:
                changed[name] = tensor.detach().to(dtype).requires_grad_(tensor.requires_grad)
        return replace(self, **changed)


def make_inputs(
    N: int = 37,
    D: int = 19,
    V: int = 63,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    bias: bool = False,
    class_weight: bool = False,
    ignored: float = 0.25,
    ignore_index: int = -100,
    scale: float = 2.0,
) -> Inputs:
    """Leaves that require gradients; logits of standard deviation `scale`, a share of the rows ignored."""

    def leaf(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape) * scale).to(device, dtype).requires_grad_()

    target_N = torch.randint(V, (N,))
    target_N[torch.rand(N) < ignored] = ignore_index
    return Inputs(
        input=leaf(N, D),
        linear_weight=leaf(V, D, scale=scale / D**0.5),
        target=target_N.to(device),
        linear_bias=leaf(V) if bias else None,
        weight=torch.rand(V).add(0.5).to(device, dtype) if class_weight else None,
    )


def fused(inputs: Inputs, **options: Any) -> Tensor:
    return lowtide.linear_cross_entropy(
        inputs.input,
        inputs.linear_weight,
        inputs.target,
        linear_bias=inputs.linear_bias,
        weight=inputs.weight,
        **options,
    )


def dense(inputs: Inputs, **options: Any) -> Tensor:
    """F.cross_entropy(F.linear(...)) with logits and all after them in float32 (float64 for float64)."""
    options.pop("workspace", None), options.pop("backend", None)
    options["ignore_index"] = -100 if options.get("ignore_index") is None else options["ignore_index"]
    dtype = torch.promote_types(inputs.input.dtype, torch.float32)
    x_ND = inputs.input.reshape(-1, inputs.input.shape[-1])
    if inputs.input.is_cuda and inputs.input.dtype in HALVES:
        logits_NV = _WideLinear.apply(x_ND, inputs.linear_weight, inputs.linear_bias)
    else:
        bias_V = None if inputs.linear_bias is None else inputs.linear_bias.to(dtype)
        logits_NV = F.linear(x_ND.to(dtype), inputs.linear_weight.to(dtype), bias_V)
    weight_V = None if inputs.weight is None else inputs.weight.to(dtype)
    loss = F.cross_entropy(logits_NV, inputs.target.reshape(-1).long(), weight=weight_V, **options)
    return loss.view(inputs.target.shape) if options.get("reduction") == "none" else loss


class _WideLinear(torch.autograd.Function):
    """F.linear of half-precision operands, in float32; its gradients are half-precision products."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_ND, weight_VD, bias_V)
        logits_NV = torch.mm(x_ND, weight_VD.t(), out_dtype=torch.float32)
        return logits_NV if bias_V is None else logits_NV + bias_V.float()

    @staticmethod
    def backward(ctx: Any, grad_NV: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x_ND, weight_VD, bias_V = ctx.saved_tensors
        grad_NV = grad_NV.to(x_ND.dtype)
        grad_bias_V = None if bias_V is None else grad_NV.sum(0)
        return grad_NV @ weight_VD, grad_NV.t() @ x_ND, grad_bias_V


def differentiate(
    loss_of: Callable[..., Tensor], inputs: Inputs, upstream: Tensor | float = 1.0, **options: Any
) -> Result:
    loss, leaves = loss_of(inputs, **options), inputs.leaves()
    seed = torch.as_tensor(upstream, dtype=loss.dtype, device=loss.device).expand_as(loss)
    return {
        "loss": loss.detach(),
        **dict(zip(leaves, torch.autograd.grad(loss, tuple(leaves.values()), seed))),
    }


# The budget.


def budget(eager: Tensor, exact: Tensor, magnitude: Tensor, *, factor: float, dtype: torch.dtype) -> float:
    """How far from `exact` a result may be: `factor` times as far as eager torch, and a rounding of its sums.

    `magnitude` is `exact` with every term of its sums taken by absolute value, `dtype` that of the sums. Two
    float64 results cannot tell which of them is off; there `eager` is float32's, scaled by the ratio of the
    two roundings.
    """
    eager_error = norm(eager.double().detach() - exact)
    if dtype == torch.float64:
        eager_error *= torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    return factor * eager_error + torch.finfo(dtype).eps * norm(magnitude)


def check(
    actual: Result, inputs: Inputs, *, factor: float = 2.0, upstream: Tensor | float = 1.0, **options: Any
) -> None:
    """Every part of `actual` has the right dtype and shape, and an error within its budget."""
    sum_dtype = torch.promote_types(inputs.input.dtype, torch.float32)
    upstream = torch.as_tensor(upstream, dtype=sum_dtype, device=inputs.input.device)
    exact_inputs = inputs.to(torch.float64)
    eager_inputs = inputs.to(torch.float32) if sum_dtype == torch.float64 else inputs
    exact = differentiate(dense, exact_inputs, upstream, **options)
    eager = differentiate(dense, eager_inputs, upstream, **options)
    magnitude = magnitudes(exact_inputs, upstream, **options)
    if exact["loss"].dim() == 0:
        # One number can be right by luck. Its rows, all erring to the same side, can not.
        rows = options | {"reduction": "none"}
        error_N = (dense(eager_inputs, **rows).double() - dense(exact_inputs, **rows)).detach()
        share = row_shares(exact_inputs, **options).nan_to_num(0)
        eager["loss"] = exact["loss"] + (error_N.nan_to_num(0, 0, 0).abs().flatten() * share).sum()

    assert actual.keys() == exact.keys()
    for name, got in actual.items():
        want, dtype = exact[name], sum_dtype if name == "loss" else getattr(inputs, name).dtype
        assert got.dtype == dtype, f"{name} is {got.dtype}, not {dtype}"
        assert got.shape == want.shape, f"{name} is {list(got.shape)}, not {list(want.shape)}"
        for same in (torch.isnan, torch.isposinf, torch.isneginf):
            assert torch.equal(same(got), same(want)), f"{name}: other elements are {same.__name__[2:]}"
        finite = want.isfinite()
        parts = (part.double().where(finite, 0) for part in (eager[name], want, magnitude[name]))
        allowed = budget(*parts, factor=factor, dtype=sum_dtype)
        error = norm((got.double() - want).where(finite, 0))
        assert error <= allowed, f"{name}: error {error:.3e} exceeds its budget {allowed:.3e}"


def row_shares(inputs: Inputs, **options: Any) -> Tensor:
    """[N]: what a row's own loss is multiplied by in the result; 0 where it is ignored."""
    ignore_index = options.get("ignore_index")
    target_N = inputs.target.reshape(-1).long()
    ignored_N = target_N == (-100 if ignore_index is None else ignore_index)
    class_weight_V = torch.ones_like(inputs.linear_weight[:, 0]) if inputs.weight is None else inputs.weight
    target_weight_N = class_weight_V.detach()[target_N.masked_fill(ignored_N, 0)].masked_fill(ignored_N, 0)
    share_N = torch.ones_like(target_weight_N).masked_fill(ignored_N, 0)
    return share_N / target_weight_N.sum() if options.get("reduction", "mean") == "mean" else share_N


@torch.no_grad()
def magnitudes(inputs: Inputs, upstream: Tensor | float = 1.0, **options: Any) -> Result:
    """The loss and its gradients with |.| around every term, so that nothing cancels; 0 where not finite."""
    smoothing, ignore_index = options.get("label_smoothing", 0.0), options.get("ignore_index")
    x_ND = inputs.input.reshape(-1, inputs.input.shape[-1])
    z_NV = F.linear(x_ND, inputs.linear_weight, inputs.linear_bias)
    V = z_NV.shape[1]
    target_N = inputs.target.reshape(-1).long()
    target_N = target_N.masked_fill(target_N == (-100 if ignore_index is None else ignore_index), 0)
    class_weight_V = z_NV.new_ones(V) if inputs.weight is None else inputs.weight
    share_N = row_shares(inputs, **options)

    upstream_N = torch.as_tensor(upstream, dtype=z_NV.dtype, device=z_NV.device)
    upstream_N = upstream_N.expand_as(inputs.target).reshape(-1)
    hit_N = (1 - smoothing) * class_weight_V[target_N]
    pull_N = hit_N + smoothing / V * class_weight_V.sum()
    grad_NV = z_NV.softmax(1) * pull_N[:, None] + smoothing / V * class_weight_V
    grad_NV.scatter_add_(1, target_N[:, None], hit_N[:, None])
    grad_NV = (grad_NV * (share_N * upstream_N.abs())[:, None]).nan_to_num(0, 0)

    gap_NV = (z_NV.logsumexp(1).abs()[:, None] + z_NV.abs()).nan_to_num(0, 0)
    loss_N = hit_N * gap_NV.gather(1, target_N[:, None])[:, 0] + smoothing / V * (gap_NV @ class_weight_V)
    loss_N *= share_N
    return {
        "loss": loss_N.view(inputs.target.shape) if options.get("reduction") == "none" else loss_N.sum(),
        "input": (grad_NV @ inputs.linear_weight.abs()).view(inputs.input.shape),
        "linear_weight": grad_NV.t() @ x_ND.abs(),
        "linear_bias": grad_NV.sum(0),
    }


def norm(tensor: Tensor) -> float:
    return torch.linalg.vector_norm(tensor.double()).item()


# Workspaces.


def smallest_workspace(call: Callable[[int], Any]) -> int:
    """The number of bytes that the error of `call(workspace)` asks for."""
    with pytest.raises(ValueError, match="workspace must") as caught:
        call(0)
    return int(re.search(r"(\d+) bytes", str(caught.value))[1])


def planned(inputs: Inputs, workspace: int | None, **options: Any) -> Plan:
    complete = {
        "reduction": "mean",
        "ignore_index": -100,
        "label_smoothing": 0.0,
        "backend": "auto",
    } | options
    return make_plan(
        inputs.input,
        inputs.linear_weight,
        inputs.linear_bias,
        weighted=inputs.weight is not None,
        workspace=workspace,
        **complete,
    )


def workspace_for(inputs: Inputs, accept: Callable[[Plan], bool], **options: Any) -> int:
    """The smallest workspace (within a per cent) whose plan is accepted."""
    low = smallest_workspace(lambda workspace: planned(inputs, workspace, **options))
    high = 2 * low
    if accept(planned(inputs, low, **options)):
        return low
    while not accept(planned(inputs, high, **options)):
        low, high = high, 2 * high
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
