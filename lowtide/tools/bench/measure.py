"""Measure one row of the benchmark: a provider on a case, timed in turn with the floor.

The floor is the work that no exact method can avoid: the step's own products (logits, dX, dW),
chunk by chunk, back to back, in the dtype of the inputs. On a processor without units for half
precision, the floor of half precision is computed in float32, if one try shows that this is faster.
Floor and provider alternate in one process, so that both run at the same clocks, and the median of
the rounds' ratios can be compared between runs and cards. `peak_bytes` is the peak beyond inputs,
loss and gradients. Errors are relative Frobenius norms against the definition (`truth.py`).

Where features or classes are no multiple of 8, cuBLAS is slow, and an exact method may pad. Then a
second floor, with both rounded up to multiples of 8, is timed in turn as well. Otherwise the two
floors are the same.

If the classes are divided over ranks, the floor is the products of all tokens with this rank's
classes. Under FSDP2 it is the products of this rank's tokens with all classes, which is as much
work.

A divergence of two heads needs the teacher's logits as well. Its floor computes the product of the
logits twice.

If a plain call is given, it is timed in turn too, and shows how much more time the provider takes.
Providers then compute different things, so they have no errors; instead, all results are checked to
be finite.

Legend: N tokens, D features, V classes, C tokens in a chunk.
"""

import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lowtide.memory import peak_memory
from lowtide.tools.bench.cases import Inputs, LossCase, Mode, own_inputs, own_results, with_mean_loss
from lowtide.tools.bench.providers import BenchEntry, TimedCall, Unavailable
from lowtide.tools.bench.timing import alternate, quantiles, ratio
from lowtide.tools.bench.truth import exact, relative_error
from lowtide.tools.ranks import from_first

ALIGNMENT = 8
FLOOR_CHUNK = 4096
MAX_ROUNDS, MIN_ROUNDS = 16, 3
BUDGET_MS = 4000.0  # Rounds beyond MIN_ROUNDS run while they fit in this time.
SWEEP_BUDGET_MS = 300.0  # It is smaller, since a sweep measures many shapes.
WARM_CALLS, WARM_MS = 7, 500.0  # lowtide records the eighth call (decision 0070)
SLOW_MS = 20_000.0  # A provider whose step takes this long is timed once.

ResultT = TypeVar("ResultT")
Truth = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]
"""The exact results, as a function of input_ND, weight_VD and target_N."""


@dataclass(frozen=True)
class Figures:
    ms: float
    ms_p20: float
    ms_p80: float
    floor_ms: float
    ratio: float
    peak_bytes: int
    errors: tuple[float, ...]  # Errors of the loss and, in a step, of dX and dW.
    aligned_floor_ms: float = math.nan  # With features and classes rounded up to multiples of 8.
    aligned_ratio: float = math.nan
    plain_ms: float | None = None
    over_plain: float | None = None  # 0.05 is 5 % more time.


@dataclass(frozen=True)
class Row:
    case: LossCase
    mode: Mode
    provider: BenchEntry
    figures: Figures | None  # None if the provider did not run; `reason` says why.
    reason: str = ""
    failed: bool = False  # True if it raised an error other than Unavailable.


def rows(
    case: LossCase,
    providers: Iterable[BenchEntry],
    mode: Mode,
    plain: BenchEntry | None = None,
    budget_ms: float = BUDGET_MS,
    truth: Truth | None = None,
) -> Iterator[Row]:
    """Measure the providers in turn; errors are against `truth`, or against the cross-entropy."""
    # Every provider is measured with products that torch does not shorten to TF32.
    torch.set_float32_matmul_precision("highest")
    bench = cache(partial(_Bench, case, mode, plain, budget_ms, truth))
    for provider in providers:

        def measured() -> Figures:
            return bench().measure(provider.call(case, bench().inputs))  # noqa: B023

        yield Row(case, mode, provider, *attempted(measured, case.device, alone=case.ranks == 1))


def attempted(
    run: Callable[[], ResultT], device: str, alone: bool = True
) -> tuple[ResultT | None, str, bool]:
    """Return the result of a provider, or None; why there is none; and whether it failed.

    An error of another package is shown in its row, and does not end the run. Of several ranks it
    ends this one, and torchrun then ends the others, which wait for it.
    """
    outcome: tuple[ResultT | None, str, bool]
    try:
        outcome = run(), "", False
    except Unavailable as unavailable:
        outcome = None, str(unavailable), False
    except Exception as error:
        if not alone:
            raise
        failed = not isinstance(error, torch.OutOfMemoryError)
        outcome = None, ("" if failed else "does not fit in memory: ") + _one_line(error), failed
    # Free memory only here: the exception is gone, and with it the last reference to the tensors.
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return outcome


class _Bench:
    """Share inputs, the floor, and the exact results or the plain call among a case's providers."""

    def __init__(
        self, case: LossCase, mode: Mode, plain: BenchEntry | None, budget_ms: float, truth: Truth | None
    ):
        self.case, self.mode = case, mode
        self.budget_ms = 0.0 if case.smoke else budget_ms  # a smoke run shows that it works
        whole = case.inputs(requires_grad=mode is Mode.STEP)
        self.inputs = own_inputs(case, whole)
        self.plain = plain.call(case, self.inputs) if plain else None
        truth = truth or partial(exact, mode=mode, softcap=case.softcap)
        self.truth = None if plain else own_results(case, truth(*whole))
        # These calls are timed in turn with each provider.
        self.beside: dict[str, Callable[[], object]] = {"floor": floor(*self.inputs, mode, case.heads)}
        if any(size % ALIGNMENT for size in self.inputs[1].shape):
            self.beside["aligned"] = floor(*aligned(*self.inputs), mode, case.heads)
        if self.plain:
            self.beside["plain"] = partial(self.step, self.plain)
            # Compile and tune it before it is timed, with or without a row of its own.
            self.step(self.plain)
            self.warm_up(self.plain, self.once(self.plain))
        self.alternate = partial(alternate, device=case.device)
        if case.ranks > 1:  # so that no rank's step waits for another's floor
            together = torch.zeros(1, device=case.device)
            self.alternate = partial(self.alternate, between=partial(dist.all_reduce, together))

    def measure(self, call: TimedCall) -> Figures:
        # The first call compiles and tunes; it and the next ones also warm up what is timed
        # afterwards.
        errors = self.errors(call, self.step(call))
        with peak_memory(self.case.device) as peak:
            started = time.perf_counter()
            outputs = self.step(call)
        once_ms = (time.perf_counter() - started) * 1e3
        peak_bytes = peak.bytes - sum(tensor.nbytes for tensor in outputs)
        del outputs

        calls, rounds = dict(self.beside), MIN_ROUNDS
        if from_first(lambda: once_ms <= SLOW_MS):
            self.warm_up(call, once_ms)
            calls["step"] = partial(self.step, call)
            round_ms = sum(span for (span,) in self.alternate(calls.values(), 1))
            rounds = from_first(lambda: max(MIN_ROUNDS, min(MAX_ROUNDS, int(self.budget_ms / round_ms))))
        spans = dict(zip(calls, self.alternate(calls.values(), rounds), strict=True))
        step_ms = [ms / call.losses for ms in spans.get("step", [once_ms] * len(spans["floor"]))]
        p20, median, p80 = quantiles(step_ms, 0.2, 0.5, 0.8)
        beside = {name: (*quantiles(spans[name], 0.5), ratio(step_ms, spans[name])) for name in self.beside}
        figures = Figures(
            *(median, p20, p80, *beside["floor"], peak_bytes, errors),
            *beside.get("aligned", beside["floor"]),
        )
        if not self.plain:
            return figures if self.case.ranks == 1 else of_all_ranks(figures)
        plain_median, over = beside["plain"]
        return replace(figures, plain_ms=plain_median, over_plain=over - 1)

    def once(self, call: TimedCall) -> float:
        """Return the milliseconds of one call."""
        started = time.perf_counter()
        self.step(call)
        if self.case.device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - started) * 1e3

    def warm_up(self, call: TimedCall, once_ms: float) -> None:
        """Repeat a call of `once_ms` milliseconds as training does, unless that takes long."""
        calls = 0 if self.case.smoke else min(WARM_CALLS, int(WARM_MS / once_ms))
        for _ in range(from_first(lambda: calls)):
            self.step(call)

    def step(self, call: TimedCall) -> tuple[Tensor, ...]:
        """Return outputs and gradients, or outputs alone, and leave `.grad` unchanged."""
        with torch.set_grad_enabled(self.mode is Mode.STEP):
            outputs = call.run()
        if self.mode is Mode.FORWARD or not call.leaves:
            return outputs
        grads = torch.autograd.grad(outputs, call.leaves, call.upstream)
        return (*(output.detach() for output in outputs), *grads)

    def errors(self, call: TimedCall, results: tuple[Tensor, ...]) -> tuple[float, ...]:
        if not call.exact:
            return ()
        if self.truth is not None:
            results = with_mean_loss(self.case, results)
            return tuple(relative_error(got, want) for got, want in zip(results, self.truth))
        if not all(result.isfinite().all() for result in results):
            raise FloatingPointError("a result is not finite")
        return ()


def of_all_ranks(figures: Figures) -> Figures:
    """Return this rank's times, with the largest peak and the largest errors of all ranks."""
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, figures)
    errors = tuple(map(max, zip(*(each.errors for each in ranks), strict=True)))
    return replace(figures, peak_bytes=max(each.peak_bytes for each in ranks), errors=errors)


def aligned(input_ND: Tensor, weight_VD: Tensor, target_N: Tensor) -> Inputs:
    """Return the inputs with zeros for features and classes up to the next multiples of 8."""
    (V, D), step = weight_VD.shape, ALIGNMENT
    padded_VD = F.pad(weight_VD.detach(), (0, -D % step, 0, -V % step))
    return F.pad(input_ND.detach(), (0, -D % step)), padded_VD, target_N


def floor(
    input_ND: Tensor, weight_VD: Tensor, target_N: Tensor, mode: Mode, heads: int = 1
) -> Callable[[], None]:
    """Return a function that computes the products alone, that of the logits for each head.

    The logits take the place of their gradient: they have its size, are random and nowhere zero.
    """
    dtype = products_dtype(input_ND.detach(), weight_VD.detach())
    x_ND, w_VD = input_ND.detach().to(dtype), weight_VD.detach().to(dtype)
    logits_CV = x_ND.new_empty(min(FLOOR_CHUNK, len(x_ND)), len(w_VD))
    grad_input_ND, grad_weight_VD = (
        (torch.empty_like(x_ND), torch.empty_like(w_VD)) if mode is Mode.STEP else (None, None)
    )

    def products() -> None:
        for start in range(0, len(x_ND), FLOOR_CHUNK):
            x_CD = x_ND[start : start + FLOOR_CHUNK]
            z_CV = logits_CV[: len(x_CD)]
            for _ in range(heads):
                torch.mm(x_CD, w_VD.T, out=z_CV)
            if grad_input_ND is not None:
                torch.mm(z_CV, w_VD, out=grad_input_ND[start : start + FLOOR_CHUNK])
                torch.mm(z_CV.T, x_CD, out=grad_weight_VD)

    return products


def products_dtype(x_ND: Tensor, w_VD: Tensor) -> torch.dtype:
    """Return the operands' dtype, or float32 for half precision on a CPU that is faster with it.

    This is decided by timing products of a corner of the operands.
    """
    if x_ND.is_cuda or x_ND.dtype not in (torch.float16, torch.bfloat16):
        return x_ND.dtype

    def products(x_CD: Tensor, w_BD: Tensor) -> tuple[Tensor, Tensor]:
        z_CB = x_CD @ w_BD.T
        return z_CB @ w_BD, z_CB.T @ x_CD

    corner = x_ND[:64], w_VD[:1024]
    dtypes = (x_ND.dtype, torch.float32)
    calls = [partial(products, *(each.to(dtype) for each in corner)) for dtype in dtypes]
    own, wide = (min(spans) for spans in alternate(calls, 3, "cpu"))
    return dtypes[own > wide]


def _one_line(error: Exception) -> str:
    first, *_ = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {first}"[:200]
