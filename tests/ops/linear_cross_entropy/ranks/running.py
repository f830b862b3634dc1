"""Choose the engine that runs the calls of ranks, and count which engines did."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from lowtide.ops.linear_cross_entropy.operator import ops
from lowtide.ops.linear_cross_entropy.planning import requirements
from lowtide.ops.linear_cross_entropy.planning.remembered import forget
from tests.support.ranks import DEVICE


@contextlib.contextmanager
def engines_counted() -> Iterator[Counter[str]]:
    """Yields how often each engine ran, in calls that no recording of earlier ones runs."""
    engines: Counter[str] = Counter()
    forget()
    make = ops._engine

    def counted(plan: Any, *operands: Any) -> Any:
        engines[plan.engine] += 1
        return make(plan, *operands)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "_engine", counted)
        yield engines


@contextlib.contextmanager
def running_on(engine: str) -> Iterator[Counter[str]]:
    """Let an engine without logits run each call that it can; that of a Hopper card on the CPU,
    too, in Triton's interpreter.

    Yields how often each engine ran.
    """
    with pytest.MonkeyPatch.context() as patch, engines_counted() as engines:
        if engine == "cpu_exponentials":
            patch.setattr(requirements, "FEWEST_WEIGHTS", 0)
        else:
            from tests.ops.linear_cross_entropy.on_exponentials import put_everywhere  # imports Triton

            if DEVICE == "cpu":
                from tests.support.interpreter import leave_out_what_has_no_effect

                leave_out_what_has_no_effect()
            put_everywhere(DEVICE, patch)
        yield engines
