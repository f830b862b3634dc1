"""Time calls in turn, as the device or the host takes them, and compare the times by round."""

import random
import time
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch

CYCLES_PER_MS = 2e6  # Cycles of a card's clock in a millisecond, or a little more.


def alternate(
    calls: Iterable[Callable[[], object]],
    rounds: int,
    device: str,
    lead_ms: float = 0.0,
    together: int = 1,
    between: Callable[[], object] | None = None,
) -> list[list[float]]:
    """Return the milliseconds of each call in each round.

    The order is shuffled in each second round and reversed in the others, since a call may take up
    to 2 % longer at one place in a round than at another. The shuffles are those of one seed, so
    that runs compare, and ranks take the same order. Each `together` calls stay in their order, as
    a forward and its backward. `between`, if given, is called before each call and is not timed.

    CUDA is timed between events, so that the host may run ahead. The card begins each round
    `lead_ms` later than the host, so that it need not wait for the host where that takes longer.
    """
    calls, shuffle = tuple(calls), random.Random(0)
    turns: list[list[tuple[Any, Any]]] = [[] for _ in calls]
    groups = [range(first, first + together) for first in range(0, len(calls), together)]
    order: list[range] = []
    for round in range(rounds):
        order = order[::-1] if round % 2 else shuffle.sample(groups, len(groups))
        if lead_ms and device == "cuda":
            torch.cuda._sleep(int(lead_ms * CYCLES_PER_MS))
        before = _mark(device)
        for number in chain(*order):
            if between is not None:
                between()
                before = _mark(device)
            calls[number]()
            after = _mark(device)
            turns[number].append((before, after))
            before = after
    if device == "cuda":
        torch.cuda.synchronize()
    return [
        [before.elapsed_time(after) if device == "cuda" else (after - before) * 1e3 for before, after in own]
        for own in turns
    ]


def host_microseconds(calls: Iterable[Callable[[], object]], rounds: int, warm: int = 0) -> list[float]:
    """Return the microseconds until each call returns, as the median of the last `rounds` rounds.

    The card is idle when a round begins, and no call waits for it. `warm` rounds come before.
    """
    calls = tuple(calls)
    spans: list[list[float]] = [[] for _ in calls]
    for _ in range(warm + rounds):
        torch.cuda.synchronize()
        for call, own in zip(calls, spans):
            started = time.perf_counter()
            call()
            own.append((time.perf_counter() - started) * 1e6)
    torch.cuda.synchronize()
    return [quantiles(own[warm:], 0.5)[0] for own in spans]


def _mark(device: str) -> Any:
    if device != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def quantiles(values: list[float], *levels: float) -> list[float]:
    return torch.tensor(values).quantile(torch.tensor(levels)).tolist()


def ratio(spans: list[float], to: list[float]) -> float:
    """Return the median of the rounds' ratios.

    Ratios are taken within a round, since clocks drift between rounds by more than what is
    compared.
    """
    (median,) = quantiles([span / other for span, other in zip(spans, to, strict=True)], 0.5)
    return median
