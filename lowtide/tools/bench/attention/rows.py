"""Measure rows of attention's benchmark: every provider on one case, timed in turn.

A provider's first step is compared with the truth, and its second is watched by the allocator. Then
all providers that succeeded take turns, forward and backward, so that all have the same clocks and
their ratios compare. A backward pass frees its graph, as in training. `peak_bytes` is the peak of a
step beyond inputs, result, upstream gradient and gradients. The rates count the two products of a
forward pass, 4 B H M N K, halved by a causal mask, and 2.5 times as much backward.

`host_us` is the time until each pass returns, measured separately with an idle card. While passes
are timed the host runs ahead, so that their times are those of the card.

Errors are relative Frobenius norms against products in float64 (`truth.py`). Dropout has none,
because each provider drops other scores; nor has a case that would take too long.

Legend: B batches, H heads, M queries, N keys, K features.
"""

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from lowtide.memory import peak_memory
from lowtide.ops.attention.backend import BackendChoice
from lowtide.tools.bench.attention.cases import Attention, AttentionCase, Inputs
from lowtide.tools.bench.attention.providers import AttentionProvider, own_choice
from lowtide.tools.bench.attention.truth import exact
from lowtide.tools.bench.measure import attempted
from lowtide.tools.bench.providers import Unavailable
from lowtide.tools.bench.timing import alternate, host_microseconds, quantiles
from lowtide.tools.bench.truth import relative_error

MAX_ROUNDS, MIN_ROUNDS = 10, 3
BUDGET_MS = 2000.0  # Time of a case: rounds beyond MIN_ROUNDS run while they fit in it.
LONGEST_TRUTH = 1 << 15  # The most queries whose results are compared with the truth.
WRONG = 0.1  # A result with a larger error is wrong; 1e-2 is usual for a bias's gradient in bfloat16.
HOST_WARM, HOST_ROUNDS = 4, 5
RECORDED, RECORDED_MS = 68, 4000.0  # a call that comes often is recorded at its 64th time
MOST_LEAD_MS = 50.0


@dataclass(frozen=True)
class Pass:
    """Hold the figures of the forward or the backward pass."""

    ms: float
    ms_p20: float
    ms_p80: float
    tflops: float
    ratio: float | None  # Ratio to the rate of the fastest other package; None if none runs.


@dataclass(frozen=True)
class AttentionFigures:
    forward: Pass
    backward: Pass | None  # None for inference.
    step_ratio: float | None  # The ratio of both passes together.
    peak_bytes: int
    errors: tuple[float, ...]  # Errors of the results that `case.results` names.
    host_us: tuple[float, ...] = ()  # Time of the host in each pass; none on a CPU, where the host computes.

    @property
    def ms(self) -> float:
        """Return the time of a step."""
        return self.forward.ms + (self.backward.ms if self.backward else 0)


@dataclass(frozen=True)
class AttentionRow:
    case: AttentionCase
    provider: AttentionProvider
    figures: AttentionFigures | None  # None if the provider did not run; `reason` says why.
    engine: str = ""  # The backend of ours that ran.
    reason: str = ""
    failed: bool = False  # It raised an error other than Unavailable, which is by design.
    way: str = ""  # Why "auto" takes that backend, as `lowtide doctor` says it.


class _Shared(NamedTuple):
    """Hold what the providers of a case share."""

    inputs: Inputs
    truth: tuple[Tensor, ...] | None
    auto: BackendChoice

    @classmethod
    def of(cls, case: AttentionCase) -> "_Shared":
        inputs = case.inputs()
        truth = exact(case, inputs) if not case.dropout and case.M <= LONGEST_TRUTH else None
        return cls(inputs, truth, own_choice(case, inputs, "auto"))


@dataclass
class _Runner:
    provider: AttentionProvider
    attention: Attention
    inputs: Inputs
    peak_bytes: int = 0
    errors: tuple[float, ...] = ()
    out: Tensor | None = None

    def forward(self) -> None:
        self.out = self.attention(self.inputs)

    def backward(self) -> tuple[Tensor, ...]:
        out, self.out = self.out, None
        assert out is not None
        return torch.autograd.grad(out, self.inputs.leaves, self.inputs.upstream)

    def step(self) -> tuple[Tensor, ...]:
        """Return the result and the gradients, or for inference the result alone."""
        self.forward()
        assert self.out is not None
        if not self.inputs.leaves:
            out, self.out = self.out, None
            return (out,)
        out = self.out.detach()
        return out, *self.backward()

    @property
    def passes(self) -> list[Callable[[], object]]:
        return [self.forward, self.backward] if self.inputs.leaves else [self.step]


def attention_rows(
    case: AttentionCase, providers: Iterable[AttentionProvider], budget_ms: float = BUDGET_MS
) -> Iterator[AttentionRow]:
    """Yield the rows of providers that cannot run, then those of the others, which take turns."""
    with _precision(case), _older_objects_frozen():
        shared = cache(partial(_Shared.of, case))
        runners: list[_Runner] = []
        for provider in providers:
            runner, reason, failed = attempted(lambda: _prepared(case, provider, shared()), case.device)  # noqa: B023
            if runner is None:
                yield AttentionRow(case, provider, None, "", reason, failed)
            else:
                runners.append(runner)
        for runner, figures in zip(runners, _timed(case, runners, budget_ms)):
            backend = runner.provider.backend
            own = () if backend is None else own_choice(case, runner.inputs, backend)
            ran, way = (own.backend, own.reason) if own else ("", "")
            yield AttentionRow(case, runner.provider, figures, ran, way=way)


@contextlib.contextmanager
def _precision(case: AttentionCase) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if case.tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def _older_objects_frozen() -> Iterator[None]:
    """Let the collections between providers skip what is there before: it takes half a second."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _prepared(case: AttentionCase, provider: AttentionProvider, shared: _Shared) -> _Runner:
    """Return the provider compiled, tuned, compared with the truth, and its memory measured."""
    if provider.backend == shared.auto.backend:
        raise Unavailable("what backend='auto' takes, a row of its own")
    runner = _Runner(provider, provider.load(case), shared.inputs)
    results = runner.step()
    if not all(result.isfinite().all() for result in results):
        raise FloatingPointError("a result is not finite")
    if shared.truth is not None:
        runner.errors = tuple(relative_error(got, want) for got, want in zip(results, shared.truth))
        name, error = max(zip(case.results, runner.errors), key=lambda each: each[1])
        if error > WRONG:
            raise ArithmeticError(f"its {name} is not that of the definition: relative error {error:.1e}")
    del results
    with peak_memory(case.device) as peak:
        results = runner.step()
    runner.peak_bytes = peak.bytes - sum(result.nbytes for result in results)
    return runner


def _timed(case: AttentionCase, runners: Sequence[_Runner], budget_ms: float) -> list[AttentionFigures]:
    calls = [call for runner in runners for call in runner.passes]
    if not calls:
        return []
    passes = len(calls) // len(runners)
    timed = partial(alternate, calls, device=case.device, together=passes)
    round_ms = sum(span for (span,) in timed(1))
    rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, int(budget_ms / round_ms)))
    host_us: list[float] = []
    if case.device == "cuda":
        for runner in runners:
            if runner.provider.backend is not None:
                for call in min(RECORDED, int(RECORDED_MS / round_ms)) * runner.passes:
                    call()
        host_us = host_microseconds(calls, HOST_ROUNDS, HOST_WARM)
        timed = partial(timed, lead_ms=min(2e-3 * sum(host_us), MOST_LEAD_MS))
    spans = timed(rounds)
    by_pass = [spans[first::passes] for first in range(passes)]
    step = [[sum(own) for own in zip(*each)] for each in zip(*by_pass)]
    peers = [runner.provider.backend is None for runner in runners]
    forward_flops = case.forward_flops
    figures = []
    for number, runner in enumerate(runners):
        forward, *backward = (
            _pass(every[number], every, peers, flops)
            for every, flops in zip(by_pass, (forward_flops, 2.5 * forward_flops))
        )
        figures.append(
            AttentionFigures(
                forward,
                backward[0] if backward else None,
                _ratio(step[number], step, peers),
                runner.peak_bytes,
                runner.errors,
                tuple(host_us[number * passes : (number + 1) * passes]),
            )
        )
    return figures


def _pass(own: list[float], every: list[list[float]], peers: list[bool], flops: float) -> Pass:
    p20, median, p80 = quantiles(own, 0.2, 0.5, 0.8)
    return Pass(median, p20, p80, flops / median / 1e9, _ratio(own, every, peers))


def _ratio(own: list[float], every: list[list[float]], peers: list[bool]) -> float | None:
    medians = [quantiles(each, 0.5)[0] for each, peer in zip(every, peers) if peer]
    return min(medians) / quantiles(own, 0.5)[0] if medians else None
