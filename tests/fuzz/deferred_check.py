"""Runs a program on the model as it is, deferred, and in float64, and compares what comes out.

What comes of the logsumexp or a loss of a half-precision head may be float32 where torch's is not
(docs/explanation/deferred_logits.md).
"""

import re
import traceback
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.fuzz.compare import FACTOR, STEP, SUMS, Finding
from tests.fuzz.deferred_program import NAMES, Program, Run
from tests.support.budgets import HALVES, norm

# torch's errors on a CPU for an index that is too large, or for any index into an empty dimension.
OUT_OF_BOUNDS = r"out of (\w+ )?(bounds|range)|indexing axis dim should be positive|from an empty tensor"
FLOAT64 = SUMS * torch.finfo(torch.float64).eps  # the error of a sum of terms of size 1 in float64
REENTRANT = "use_reentrant=True|checkpoint reentrant"
# "Where it does not work, and says so" of that page: a line, and what the error speaks of.
DOCUMENTED = {REENTRANT: "autograd.Function", "as_tensor": "reader of arrays"}


class Evaluation(NamedTuple):
    value: Any = None
    gradients: dict[str, Tensor] = {}  # noqa: RUF012
    trace: tuple[Any, ...] = ()
    error: Exception | None = None
    backward: bool = False
    largest: float = 0.0


def evaluate(program: Program, way: str, device: str, noise: int = 0) -> Evaluation:
    run, value, backward = Run(program, way, device, noise), None, False
    try:
        value = run.result()
        trace = tuple(run.trace)
        value = getattr(value, "logits", value)  # as_tensor returns the leaf of a tree as it is
        if hasattr(value, "materialize"):
            value = value.materialize()
        gradients = {}
        if isinstance(value, Tensor) and value.requires_grad and not program.has("data"):
            backward = True
            generator = torch.Generator().manual_seed(5)
            mixture = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(device)
            if way == "deferred exact" and noise:
                _perturb_gradients(value, noise)
            (value.double() * mixture).sum().backward()
            leaves = run.leaves().items()
            gradients = {name: torch.zeros_like(t) if t.grad is None else t.grad for name, t in leaves}
    except Exception as error:
        traceback.clear_frames(error.__traceback__)  # where a checkpoint holds its hooks
        return Evaluation(value, {}, tuple(run.trace), error, backward)
    finally:
        if run.deferral is not None:
            run.deferral.undo()
    return Evaluation(value, gradients, trace, largest=run.largest)


def _perturb_gradients(value: Tensor, noise: int) -> None:
    """Let each operation's gradient be off by STEP of itself, before it joins what others give."""
    generator = torch.Generator().manual_seed(noise)

    def perturbed(gradients: Any, _: Any) -> Any:
        return tuple(
            each
            if each is None
            else each * (1 + STEP * torch.randn(each.shape, generator=generator).to(each))
            for each in gradients
        )

    nodes, met = [value.grad_fn], {value.grad_fn}
    for node in nodes:
        node.register_hook(perturbed)
        following = {each for each, _ in node.next_functions if each is not None} - met
        nodes += following
        met |= following


def check(program: Program, device: str) -> None:
    if device == "cuda" and re.search(OUT_OF_BOUNDS, str(evaluate(program, "plain", "cpu").error)):
        return  # there it ends the process, of torch alone, too
    plain, ours = evaluate(program, "plain", device), evaluate(program, "deferred", device)
    if isinstance(plain.error, (NameError, SyntaxError)):
        return  # the program is cut short
    if ours.error is not None:
        _check_error(program, plain.error, ours.error)
        return
    if plain.error is not None:
        if not _may_be_taken(program, plain, device):
            raise Finding(
                f"no error, where torch has {type(plain.error).__name__}: {first_line(plain.error)}"
            )
        return
    reentrant = re.search(REENTRANT, str(program)) is not None
    for line, (theirs, own) in enumerate(zip(plain.trace, ours.trace)):
        widened = program.widens and theirs[1] in HALVES and own[1] == torch.float32
        # Out of a reentrant checkpoint they have no gradient, and say so when they are used.
        same = theirs[0] == own[0] and (theirs[1] == own[1] or widened)
        if not same or (theirs[2] != own[2] and not reentrant):
            raise Finding(f"z is {own} after line {line} of the trace, not {theirs}")
    if isinstance(plain.value, Tensor) != isinstance(ours.value, Tensor):
        raise Finding(f"a {type(ours.value).__name__}, not a {type(plain.value).__name__}")
    check_values(program, plain, ours, device)


def _may_be_taken(program: Program, plain: Evaluation, device: str) -> bool:
    """Return whether torch's error concerns its memory or its kernels, and not the numbers."""
    text = str(plain.error)
    if plain.backward and program.has("changes", "data"):
        # Torch refuses a change of what it has saved; lowtide has saved it before, or saved
        # something else.
        return True
    # Torch refuses a change of one of several views, or of what it has saved, which may be a copy
    # here.
    if program.has("in place"):
        return re.search("modified (by an )?inplace|Can't detach views", text) is not None
    # Class weights of another dtype: there is no such kernel on CUDA.
    weights = device == "cuda" and "autocast" in str(program) and "weight=" in str(program)
    return weights and re.search("expected scalar type (Float|Double) but", text) is not None


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:150]


def _check_error(program: Program, theirs: Exception | None, ours: Exception) -> None:
    text = f"{type(ours).__name__}: {first_line(ours)}"
    if theirs is not None:
        alike = isinstance(ours, (RuntimeError, IndexError, ValueError, TypeError)) or type(ours) is type(
            theirs
        )
        if not alike:
            raise Finding(f"{text}, where torch has {type(theirs).__name__}: {first_line(theirs)}")
        return
    if isinstance(ours, RuntimeError) and (
        program.has("changes", "data")
        or (program.has("in place") and re.search("in.?place", str(ours)))
        or any(re.search(line, str(program)) and said in str(ours) for line, said in DOCUMENTED.items())
    ):
        return
    raise Finding(f"raises where torch does not: {text}")


# Values.


def check_values(program: Program, plain: Evaluation, ours: Evaluation, device: str) -> None:
    plain, ours = (each._replace(value=_as_tensor(each.value)) for each in (plain, ours))
    got, want = ours.value, plain.value
    widened = want.dtype in HALVES and got.dtype == torch.float32
    if got.dtype != want.dtype and not widened:
        raise Finding(f"the result is {got.dtype}, not {want.dtype}")
    if got.shape != want.shape:
        raise Finding(f"the result has shape {list(got.shape)}, not {list(want.shape)}")
    if device == "cuda" and got.dim() == 0 and got.isnan() and want == 0 and "ignore_index" in str(program):
        return  # torch's mean over one ignored row without a batch is 0 on CUDA, and NaN everywhere else
    if got.requires_grad != want.requires_grad:
        raise Finding(f"the result's requires_grad is {got.requires_grad}, not {want.requires_grad}")
    if not want.is_floating_point():
        if program.dtype == "f64" and "autocast" not in str(program) and not torch.equal(got, want):
            raise Finding(f"the result is {got.tolist()}, not {want.tolist()}")
        return
    if ours.gradients.keys() != plain.gradients.keys():
        raise Finding(f"gradients of {list(ours.gradients)}, not {list(plain.gradients)}")
    names = ["the result", *plain.gradients]
    pairs = [
        (own.detach().double(), theirs.detach().double()) for own, theirs in zip(_parts(ours), _parts(plain))
    ]
    eps = _precision(program)
    if all(_same(own, theirs, 16 * eps) for own, theirs in pairs):
        return
    _check_errors(names, pairs, program, plain.largest, eps, device)


def _check_errors(
    names: list[str],
    pairs: list[tuple[Tensor, Tensor]],
    program: Program,
    largest: float,
    eps: float,
    device: str,
) -> None:
    others = [
        evaluate(program, way, device, noise)
        for way, noise in (("exact", 0), ("single", 0), ("perturbed", 1), ("perturbed", 2))
    ]
    if any(each.error is not None or len(each.gradients) != len(names) - 1 for each in others):
        if all(_same(own, theirs, 1e3 * eps) for own, theirs in pairs):
            return
        raise Finding(f"far from torch's, and no truth: {[each.error for each in others]}")
    others = [each._replace(value=_as_tensor(each.value)) for each in others]
    # A gradient whose terms cancel has the roundings of those that do not.
    sizes = (each.double().nan_to_num(0, 0, 0).abs() for each in _parts(others[0]) if each.numel())
    scale = max((each.max().item() for each in sizes), default=0.0)
    for name, (own, theirs), exact, single, *moved in zip(names, pairs, *map(_parts, others)):
        exact, single, *moved = (each.detach().double() for each in (exact, single, *moved))
        sure = exact.isfinite() & theirs.isfinite() & single.isfinite()
        if not own[sure].isfinite().all():
            raise Finding(f"{name} is {own.tolist()}, not {exact.tolist()}")
        own, theirs, exact, single = (each[sure] for each in (own, theirs, exact, single))
        size = exact.abs() + _moved(exact, [each[sure] for each in moved])
        many = (size.sum().square() / size.square().sum().clamp_min(1e-300)).item()
        allowed = FACTOR * (norm(theirs - exact) + 2.0**-29 * norm(single - exact))
        # One number may be right by luck, many are not.
        allowed += max(1 / max(many, 1), 0.02) * eps * norm(size)
        if name != names[0]:
            allowed += 0.25 * eps * scale * own.numel() ** 0.5
        # Where roundings of the first order cancel, as in the slope of lse(z - lse(z))^2, the next
        # remain.
        floor = max(eps**2, FLOAT64)
        allowed += floor * largest * max(1, own.numel()) ** 0.5
        allowed += FLOAT64 * norm(size)
        error = norm(own - exact)
        if not error <= allowed and name != names[0]:
            allowed += eps * _of_parts(program, device, name, exact, sure, allowed)
        if not error <= allowed:
            raise Finding(
                f"{name}: error {error:.3e} exceeds {allowed:.3e}; torch's own is {norm(theirs - exact):.3e} "
                f"of {norm(exact):.3e}"
            )


def _of_parts(program: Program, device: str, name: str, exact: Tensor, sure: Tensor, allowed: float) -> float:
    """The size of what a gradient is added up from, each term rounded by itself: terms may cancel.

    Real logits and each fused number give one. It is how far the float64 gradient of the deferred
    program moves if each operation's does, by three standard deviations of a rounding. That
    gradient is checked first: roundings aside, those of its own terms included, the deferred
    program is right.
    """
    every = [evaluate(program, "deferred exact", device, noise) for noise in range(3)]
    if any(name not in each.gradients for each in every):
        return 0.0
    base, *moved = (each.gradients[name].detach().double()[sure] for each in every)
    size = norm(_moved(base, moved))
    error, allowed = norm(base - exact), 1e-6 * (allowed + norm(exact)) + FLOAT64 * size
    if not error <= allowed:
        raise Finding(f"{name}: in float64 error {error:.3e} exceeds {allowed:.3e} of {norm(exact):.3e}")
    return size


def _moved(exact: Tensor, moved: list[Tensor]) -> Tensor:
    """Return how far a result moves, relative to STEP, by which others were perturbed."""
    return torch.stack([(each - exact).nan_to_num(0, 0, 0).abs() / STEP for each in moved]).amax(0)


def _parts(evaluation: Evaluation) -> list[Tensor]:
    return [evaluation.value, *evaluation.gradients.values()]


def _same(own: Tensor, theirs: Tensor, eps: float) -> bool:
    finite = theirs.isfinite()
    if not torch.equal(own.isfinite(), finite):
        return False
    return norm((own - theirs)[finite]) <= eps * norm(theirs[finite])


def _as_tensor(value: Any) -> Tensor:
    """A result as a tensor: numbers, and lists of them, too."""
    if isinstance(value, Tensor):
        return value
    if not isinstance(value, (bool, int, float, list, tuple, torch.Size)):
        raise Finding(f"the result is a {type(value).__name__}")
    made = torch.tensor(value)
    return made.double() if made.is_floating_point() else made


def _precision(program: Program) -> float:
    """The coarsest rounding that the program speaks of."""
    text = str(program)
    named = {name for name in NAMES if re.search(rf"\b{name}\b", text)}
    methods = {"half": "f16", "bfloat16": "bf16", "float": "f32"}
    named |= {name for method, name in methods.items() if f".{method}()" in text}
    return max(torch.finfo(NAMES[name]).eps for name in named)
