"""Measure rows of attention's benchmark: every provider on one case, timed in turn.

A provider's first step is compared with the truth, and its second is watched by the allocator. Then
all providers that succeeded take turns, forward and backward, so that all have the same clocks and
their ratios compare. A backward pass frees its graph, as in training. `peak_bytes` is the peak of a
step beyond inputs, result, upstream gradient and gradients. The rates count the two products of a
forward pass, 4 B H M N K, halved by a causal mask, and 2.5 times as much backward.

Errors are relative Frobenius norms against products in the next wider dtype. Dropout has none,
because each provider drops other scores; nor has a case that would take too long.

Legend: B batches, H heads, M queries, N keys, K features.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from lowtide import attn_bias
from lowtide.memory import peak_memory
from lowtide.ops.attention import dispatch
from lowtide.ops.attention.definition.layouts import from_xformers
from lowtide.ops.attention.definition.operands import AttentionCall, Operands, Options
from lowtide.tools.bench.attention.cases import AttentionCase, Inputs
from lowtide.tools.bench.attention.providers import Attention, AttentionProvider
from lowtide.tools.bench.attention.truth import exact
from lowtide.tools.bench.measure import alternate, attempted, quantiles, relative_error
from lowtide.tools.bench.providers import Unavailable

MAX_ROUNDS, MIN_ROUNDS = 10, 3
BUDGET_MS = 2000.0  # Of a case: rounds beyond MIN_ROUNDS run while they fit in this time.
LONGEST_TRUTH = 1 << 15  # In queries.


@dataclass(frozen=True)
class Pass:
    """Hold the figures of the forward or the backward pass."""

    ms: float
    ms_p20: float
    ms_p80: float
    tflops: float
    ratio: float | None  # To the rate of the fastest peer; None if no peer runs.


@dataclass(frozen=True)
class AttentionFigures:
    forward: Pass
    backward: Pass
    step_ratio: float | None  # Of both passes together.
    peak_bytes: int
    errors: tuple[float, ...]  # Of the result and the gradients of query, key, value and bias.


@dataclass(frozen=True)
class AttentionRow:
    case: AttentionCase
    provider: AttentionProvider
    figures: AttentionFigures | None  # None if the provider did not run; `reason` says why.
    engine: str = ""  # The backend of ours that ran.
    reason: str = ""
    failed: bool = False  # It raised an error other than Unavailable, which is by design.


class _Shared(NamedTuple):
    """Hold what the providers of a case share."""

    inputs: Inputs
    truth: tuple[Tensor, ...] | None
    auto: str  # The backend that "auto" takes.

    @classmethod
    def of(cls, case: AttentionCase) -> "_Shared":
        inputs = case.inputs()
        truth = exact(case, inputs) if not case.dropout and case.M <= LONGEST_TRUTH else None
        return cls(inputs, truth, _backend(case, inputs, "auto"))


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
        """Return the result and the gradients."""
        self.forward()
        assert self.out is not None
        out = self.out.detach()
        return out, *self.backward()


def attention_rows(case: AttentionCase, providers: Iterable[AttentionProvider]) -> Iterator[AttentionRow]:
    """Yield providers that do not run as they fail, then the others in their given order."""
    with _precision(case):
        shared = cache(partial(_Shared.of, case))
        runners: list[_Runner] = []
        for provider in providers:
            runner, reason, failed = attempted(lambda: _prepared(case, provider, shared()), case.device)  # noqa: B023
            if runner is None:
                yield AttentionRow(case, provider, None, "", reason, failed)
            else:
                runners.append(runner)
        for runner, figures in zip(runners, _timed(case, runners)):
            backend = runner.provider.backend
            ran = "" if backend is None else _backend(case, runner.inputs, backend)
            yield AttentionRow(case, runner.provider, figures, ran)


@contextlib.contextmanager
def _precision(case: AttentionCase) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if case.tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _prepared(case: AttentionCase, provider: AttentionProvider, shared: _Shared) -> _Runner:
    """Return the provider compiled, tuned, compared with the truth, and its memory measured."""
    if provider.backend == shared.auto:
        raise Unavailable("what backend='auto' takes, a row of its own")
    runner = _Runner(provider, provider.load(case), shared.inputs)
    results = runner.step()
    if not all(result.isfinite().all() for result in results):
        raise FloatingPointError("a result is not finite")
    if shared.truth is not None:
        runner.errors = tuple(relative_error(got, want) for got, want in zip(results, shared.truth))
    del results
    with peak_memory(case.device) as peak:
        results = runner.step()
    runner.peak_bytes = peak.bytes - sum(result.nbytes for result in results)
    return runner


def _timed(case: AttentionCase, runners: Sequence[_Runner]) -> list[AttentionFigures]:
    calls: list[Callable[[], object]] = [
        call for runner in runners for call in (runner.forward, runner.backward)
    ]
    if not calls:
        return []
    timed = partial(alternate, calls, device=case.device)
    round_ms = sum(span for (span,) in timed(1))
    spans = timed(max(MIN_ROUNDS, min(MAX_ROUNDS, int(BUDGET_MS / round_ms))))
    forward, backward = spans[::2], spans[1::2]
    step = [[sum(pair) for pair in zip(*passes)] for passes in zip(forward, backward)]
    peers = [runner.provider.backend is None for runner in runners]
    forward_flops = case.forward_flops
    return [
        AttentionFigures(
            _pass(forward_ms, forward, peers, forward_flops),
            _pass(backward_ms, backward, peers, 2.5 * forward_flops),
            _ratio(step_ms, step, peers),
            runner.peak_bytes,
            runner.errors,
        )
        for runner, forward_ms, backward_ms, step_ms in zip(runners, forward, backward, step)
    ]


def _pass(own: list[float], every: list[list[float]], peers: list[bool], flops: float) -> Pass:
    p20, median, p80 = quantiles(own, 0.2, 0.5, 0.8)
    return Pass(median, p20, p80, flops / median / 1e9, _ratio(own, every, peers))


def _ratio(own: list[float], every: list[list[float]], peers: list[bool]) -> float | None:
    medians = [quantiles(each, 0.5)[0] for each, peer in zip(every, peers) if peer]
    return min(medians) / quantiles(own, 0.5)[0] if medians else None


def _backend(case: AttentionCase, inputs: Inputs, backend: str) -> str:
    """Return the backend that a call takes which asks for this one."""
    _, *own = from_xformers(inputs.query, inputs.key, inputs.value, inputs.bias)
    mask = attn_bias.LowerTriangularMask() if case.causal else None
    options = Options(case.K**-0.5, dropout=case.dropout, backend=backend)
    return dispatch.choose(AttentionCall(Operands(*own), mask, None, options)).backend
