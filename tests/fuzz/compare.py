"""Decides if results are close enough to float64: the budget of tests/support/budgets.py, and a few
roundings.

That budget is for chosen inputs. Here there are any: results of one number, where eager torch is
right by luck; gradients that underflow or leave the range of their dtype; half-precision factors
that are rounded once more. So errors of eager torch count threefold, and a rounding of each
result's own dtype is added.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.support.budgets import Result, budget, norm

STEP = 1e-6  # the size of the perturbation that `measured` takes
FACTOR = 3.0
SUMS = 64  # roundings of a sum of thousands of terms that all err to the same side
SUMS_OF_BOTH = 256  # for float64, whose truth is no more exact, and is added up in another order


class Finding(AssertionError):
    """Something that must not be."""


class References(NamedTuple):
    exact: Result
    eager: Result
    """In the dtype under test, or float32 for float64."""
    magnitude: Result
    """The exact results, every term of their sums taken by absolute value, or more."""


def compare(
    found: Result,
    references: References,
    dtypes: Mapping[str, torch.dtype],
    sum_dtype: torch.dtype,
    *,
    rounding: float = 0.0,
    terms: Mapping[str, Tensor] | None = None,
) -> None:
    """Raise a Finding for the first part whose shape, dtype or error is not as it should be.

    `rounding`: of the magnitude, if something between is rounded to fewer digits than the results
    are (autocast). `terms`: for a result whose terms are rounded to its dtype before they are
    added, the sum of their absolute values. Each term errs by half a unit in its last place, and
    all may err to the same side.
    """
    if found.keys() != references.exact.keys():
        raise Finding(f"results {list(found)}, not {list(references.exact)}")
    for name, got in found.items():
        want, eager, magnitude = (each[name].detach().double() for each in references)
        if got.dtype != dtypes[name]:
            raise Finding(f"{name} is {got.dtype}, not {dtypes[name]}")
        if got.shape != want.shape:
            raise Finding(f"{name} has shape {list(got.shape)}, not {list(want.shape)}")
        if got.is_floating_point():
            own = torch.zeros_like(want) if terms is None else terms.get(name, torch.zeros_like(want))
            _compare(name, got, want, eager, magnitude, sum_dtype, rounding, own)


def _compare(
    name: str,
    got: Tensor,
    want: Tensor,
    eager: Tensor,
    magnitude: Tensor,
    sum_dtype: torch.dtype,
    rounding: float,
    terms: Tensor,
) -> None:
    info = torch.finfo(got.dtype)
    # Beyond the range of its dtype, or near its end, a number may be infinite or not; and so where
    # a sum that cancels has terms beyond the range of what it is formed in.
    near = torch.maximum(want.abs(), magnitude.abs().nan_to_num(torch.inf)) > info.max / 8
    certain = want.isfinite() & ~near & eager.isfinite()
    if not got[certain].isfinite().all():
        raise Finding(
            f"{name} is not finite in {(~got[certain].isfinite()).sum()} elements where it should be"
        )
    if (finite_by_luck := got.isfinite() & want.isnan() & eager.isnan()).any():
        raise Finding(f"{name} is finite in {finite_by_luck.sum()} elements where it should be NaN")
    parts = [part.where(certain, 0) for part in (eager, want, magnitude)]
    allowed = budget(*parts, factor=FACTOR, dtype=sum_dtype)
    eps = max(info.eps, rounding)
    sums = SUMS_OF_BOTH if sum_dtype == torch.float64 else SUMS
    allowed += (eps + sums * torch.finfo(sum_dtype).eps) * max(norm(parts[2]), norm(parts[1]))
    allowed += info.eps / 2 * norm(terms.where(certain, 0))
    # Numbers that underflow; and those that are nothing beside operands of about 1.
    smallest = 2 * info.smallest_normal * info.eps + torch.finfo(sum_dtype).eps ** 1.5
    allowed += smallest * max(1, got.numel()) ** 0.5
    error = norm((got.double() - want).where(certain, 0))
    if not error <= allowed:
        raise Finding(f"{name}: error {error:.3e} exceeds {allowed:.3e} (of {norm(parts[1]):.3e})")


Run = Callable[[Callable[[Tensor], Tensor]], Result]
"""Computes results densely, of operands that went through what it is given."""


def measured(run: Run, dtype: torch.dtype, *, cancels: bool = False) -> References:
    """The references of anything. Magnitudes are how far float64 results move when all operands do;
    if they may be sums of which nothing is left (`cancels`), no less than 1, about which operands
    are, and the largest result."""
    exact = run(lambda tensor: tensor.double())
    eager = run(lambda tensor: tensor.to(torch.float32 if dtype == torch.float64 else dtype))
    if dtype in (torch.float32, torch.float64):
        eager = _without_luck(run, exact, eager)
    magnitude = exact
    if cancels:
        sizes = [part.abs().nan_to_num(0, 0, 0).max().item() for part in exact.values() if part.numel()]
        magnitude = {name: torch.full_like(part, max(1.0, *sizes, 0.0)) for name, part in exact.items()}
    return widened(References(exact, eager, magnitude), run)


def _without_luck(run: Run, exact: Result, eager: Result) -> Result:
    """Return those of eager float32's results that err most, of operands nearby too.

    Where 1 - p of a confident row is left, one run may be right by luck.
    """
    runs = [eager]
    for seed in (1, 2):
        single, double = (run(_moved(seed, dtype)) for dtype in (torch.float32, torch.float64))
        runs.append({name: want + single[name].double() - double[name] for name, want in exact.items()})

    def error(each: Result, name: str) -> float:
        finite = torch.equal(each[name].isfinite(), eager[name].isfinite())
        return norm((each[name].double() - exact[name]).nan_to_num(0, 0, 0)) if finite else -1.0

    return {name: max(runs, key=lambda each: error(each, name))[name] for name in eager}


def _moved(seed: int, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Moves numbers by about a hundredth, to the same float32 numbers whatever the dtype."""
    generator = torch.Generator().manual_seed(seed)

    def move(tensor: Tensor) -> Tensor:
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        return (tensor.double() * (1 + 0.01 * noise.to(tensor.device))).float().to(dtype)

    return move


def widened(references: References, run: Run) -> References:
    """Magnitudes that are no less than how far the results move, relatively to the operands."""
    generator = torch.Generator().manual_seed(0)

    def perturbed(tensor: Tensor) -> Tensor:
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        return tensor.double() * (1 + STEP * noise.to(tensor.device))

    moved = [run(perturbed) for _ in range(2)]
    magnitude = {}
    for name, want in references.exact.items():
        shifts = [(each[name] - want).double().nan_to_num(0, 0, 0).abs() / STEP for each in moved]
        size = want.double().nan_to_num(0, 0, 0).abs() + torch.maximum(*shifts)
        magnitude[name] = torch.maximum(size, references.magnitude[name].double().abs())
    return references._replace(magnitude=magnitude)


def mapped(inputs: Any, convert: Callable[[Tensor], Tensor]) -> Any:
    """A dataclass of tensors with its floating-point ones converted; leaves stay leaves."""
    changed = {}
    for field in fields(inputs):
        tensor = getattr(inputs, field.name)
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            changed[field.name] = convert(tensor.detach()).detach().requires_grad_(tensor.requires_grad)
    return replace(inputs, **changed)


def is_argument_error(error: BaseException) -> bool:
    """An error that lowtide raises of what a caller passes."""
    return type(error).__name__ in ("ArgumentError", "ArgumentTypeError")


def must_raise(function: Callable[[], Any], what: str) -> None:
    try:
        function()
    except Exception as error:
        if not is_argument_error(error):
            raise
    else:
        raise Finding(f"no error: {what}")
