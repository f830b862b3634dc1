"""Run fifty calls on this machine, and compare values and gradients with torch in float64.

Each case is a call of lowtide's and its definition in plain torch. The definition in float64, on
the CPU, is the truth, and the definition in the case's own dtype, with logits and scores in
float32, says how large an error may be.
"""

import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lowtide.tools.doctor.selftest_cases import CASES, CONSTANTS, Case, Function, Tensors

FACTOR = 4
"""An error may be so many times that of plain torch, beside rounding; tests are stricter."""


class Outcome(NamedTuple):
    """Hold the largest relative error among the value and the gradients of a case."""

    case: Case
    error: float
    allowed: float
    seconds: float
    reason: str = ""
    """The exception, if the call raised one."""

    @property
    def passed(self) -> bool:
        return not self.reason and self.error <= self.allowed


def run(device: str) -> Iterator[Outcome]:
    """Yield the outcome of each case as it ends.

    Meanwhile torch computes float32 products without TF32, whatever its setting.
    """
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        for case in cases_on(device):
            yield _outcome(case, device)
    finally:
        torch.set_float32_matmul_precision(precision)


def cases_on(device: str) -> tuple[Case, ...]:
    """Return the cases of dtypes that the device has: mps has no float64."""
    try:
        torch.empty((), dtype=torch.float64, device=device)
    except TypeError:
        return tuple(case for case in CASES if case.dtype != torch.float64)
    return CASES


def _outcome(case: Case, device: str) -> Outcome:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        given = case.tensors()
    dtype = case.dtype
    rounded = {name: _as(dtype, tensor) for name, tensor in given.items()}
    truth = _results(case.plain, {name: _as(torch.float64, each) for name, each in rounded.items()})
    tensors = {name: tensor.to(device) for name, tensor in rounded.items()}
    # A wide dtype rounds in every addition, a narrow one once.
    rounding = (1 if dtype.itemsize == 2 else 64) * torch.finfo(dtype).eps
    budget = FACTOR * _error(_results(case.plain, tensors), truth) + rounding
    started = time.perf_counter()
    try:
        found = _results(case.ours, tensors)
        error = _error(found, truth)
    except Exception as problem:  # A report is due whatever a call does.
        error, reason = float("nan"), f"{type(problem).__name__}: {problem}"
    else:
        reason = ""
    return Outcome(case, error, budget, time.perf_counter() - started, reason)


def _as(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _results(function: Function, tensors: Tensors) -> list[Tensor]:
    """Return the value, and the gradients of all floating-point tensors."""
    leaves: Tensors = {
        name: nn.Parameter(tensor.clone()) if tensor.is_floating_point() and name not in CONSTANTS else tensor
        for name, tensor in tensors.items()
    }
    value = function(leaves)
    # An upstream gradient of another size in each element.
    grad_output = torch.linspace(0.5, 1.5, value.numel(), device=value.device).view_as(value).to(value.dtype)
    wanted = [tensor for tensor in leaves.values() if tensor.requires_grad]
    return [value.detach(), *torch.autograd.grad(value, wanted, grad_output)]


def _error(found: list[Tensor], truth: list[Tensor]) -> float:
    """Return the largest relative error, by norms; NaN and infinity count as infinite."""
    errors = []
    for one, exact in zip(found, truth):
        error = (one.cpu().double() - exact).norm() / exact.norm().clamp(min=1e-30)
        errors.append(error.item() if error.isfinite() else float("inf"))
    return max(errors)
