"""Measure every provider on one head and number of tokens; name the engine that lowtide chooses.

Legend: N tokens, D features, V classes.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lowtide.tools.bench.cases import IGNORE_INDEX, Inputs, LossCase, Mode
from lowtide.tools.bench.heads.data import ModelHead
from lowtide.tools.bench.measure import SWEEP_BUDGET_MS, Row, rows
from lowtide.tools.bench.providers import PROVIDERS, SWEPT, BenchEntry, Provider, TimedCall, lowtide_provider
from lowtide.tools.doctor.linear_cross_entropy import AskedLossCall
from lowtide.tools.units import GIB, MIB

TOKENS = {"cuda": (256, 1024, 4096, 16384, 65536), "cpu": (256,)}
DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}


@dataclass(frozen=True)
class HeadCase(LossCase):
    head: ModelHead = field(kw_only=True)


@dataclass(frozen=True)
class HeadRow(Row):
    case: HeadCase
    engine: str = ""  # Named as in `lowtide doctor`; "" if the provider is not lowtide.
    chunks: str = ""
    predicted_ratio: float = math.nan
    """The ratio to the aligned floor that `lowtide doctor` predicts."""


class CountedTokens(Provider):
    """Run lowtide on the tokens alone whose targets are not ignored, chosen before it is timed."""

    def call(self, case: LossCase, inputs: Inputs) -> TimedCall:
        input_ND, weight_VD, target_N = inputs
        counted_N = target_N != IGNORE_INDEX
        counted_MD = input_ND.detach()[counted_N].requires_grad_(input_ND.requires_grad)
        return super().call(case, (counted_MD, weight_VD, target_N[counted_N]))


def head_cases(
    heads: Iterable[ModelHead], tokens: Sequence[int], device: str, ignored: float | None = None
) -> list[HeadCase]:
    """Return a case for each head and number of tokens, with this share of the tokens ignored."""
    changed: dict[str, Any] = {} if ignored is None else {"ignored": ignored}
    suffix = "" if ignored is None else f"-ignored-{100 * ignored:g}"
    return [
        HeadCase(
            *(f"{head.name}-{count}{suffix}", count, head.features, head.classes, DTYPES[device], device),
            softcap=head.softcap,
            head=head,
            **changed,
        )
        for head in heads
        for count in tokens
    ]


def head_providers(workspaces: Iterable[int | None]) -> list[Provider]:
    """Return lowtide with each workspace, then torch's own losses and those of other packages."""
    ours = [lowtide_provider(f"lowtide{_suffix(size)}", size) for size in workspaces]
    names = {*SWEPT, "compile-aot-eager"}
    return ours + [each for each in PROVIDERS if each.name in names and each.distribution != "lowtide"]


def _suffix(workspace: int | None) -> str:
    if workspace is None:
        return ""
    unit, name = next(
        (unit, name) for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (1, "B")) if workspace % unit == 0
    )
    return f"-{workspace // unit}{name}"


def counted_rows() -> BenchEntry:
    """Return the call beside which `head_rows` times the providers of a case with ignored rows."""
    return lowtide_provider("lowtide-counted-rows", None, CountedTokens)


def head_rows(
    case: HeadCase, providers: Iterable[Provider], plain: BenchEntry | None = None
) -> Iterator[HeadRow]:
    for row in rows(case, providers, Mode.STEP, plain, SWEEP_BUDGET_MS):
        ours = row.provider.distribution == "lowtide" and row.figures is not None
        yield HeadRow(**vars(row), **(_way(case, row.provider.workspace) if ours else {}))


def _way(case: HeadCase, workspace: int | None) -> dict[str, Any]:
    """Return what `lowtide doctor` says of the call, by the fields of a row."""
    call = AskedLossCall(
        *(case.tokens, case.features, case.classes),
        dtype=case.dtype,
        device=case.device,
        softcap=case.softcap,
        workspace=workspace,
    )
    found = call.describe()
    predicted = call.predicted(case.ignored)
    ratio = {} if predicted is None else {"predicted_ratio": predicted[1]}
    return {"engine": found["engine"], "chunks": found["rows"], **ratio}
