"""Implement `lowtide bench linear-cross-entropy`, `options`, `chunked-loss` and `distillation`."""

from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from lowtide.cli.bench.ranks import FullySharded, TensorParallel, check_ranks
from lowtide.cli.bench.tables import CaseTable, Names, Out, Smoke, choose, names_option, print_tables
from lowtide.cli.shared.parameters import DeviceOption
from lowtide.cli.shared.parameters import workspace as workspace_option
from lowtide.tools.bench.cases import AXES, CASES, LossCase, Mode, divided, sweep
from lowtide.tools.bench.chunked import entries as chunked_entries
from lowtide.tools.bench.distillation import DIVERGENCES, divergence_providers, divergence_rows
from lowtide.tools.bench.measure import BUDGET_MS, SWEEP_BUDGET_MS, rows
from lowtide.tools.bench.options import WORKSPACE, options
from lowtide.tools.bench.providers import PROVIDERS, SWEPT
from lowtide.tools.bench.ranks.fsdp import FULLY_SHARDED
from lowtide.tools.bench.ranks.tensor_parallel import DIVIDED
from lowtide.tools.bench.trained import trained_cases
from lowtide.tools.environment import Device, choose_device
from lowtide.tools.ranks import from_first, joined

OPTIONS_CASE = {"cuda": "B", "cpu": "cpu-small"}
CHUNKED_CASE = {"cuda": "A", "cpu": "cpu"}
DISTILLATION_CASE = {"cuda": "B-8192", "cpu": "cpu-small"}
SWEPT_CASE = {"cuda": "A", "cpu": "cpu-small"}
FSDP_CASE = {"cuda": "B-4096", "cpu": "cpu-small"}

Axis = Enum("Axis", {axis: axis for axis in AXES}, type=str)  # type: ignore[misc]


class Logits(str, Enum):
    random = "random"
    trained = "trained"


def linear_cross_entropy(
    case: Annotated[Names, names_option("A shape", "all of the device")] = None,
    provider: Annotated[Names, names_option("An implementation")] = None,
    mode: Annotated[Mode, typer.Option(help="Loss and gradients, or the loss alone.")] = Mode.STEP,
    along: Annotated[
        list[Axis] | None,
        typer.Option("--sweep", help="Shapes along this axis, through one --case; repeatable."),
    ] = None,
    logits: Annotated[
        Logits, typer.Option(help="Logits of random tensors, or of a trained head on held-out text.")
    ] = Logits.random,
    checkpoint: Annotated[
        Path | None, typer.Option(help="For trained logits: the directory --out of lowtide train.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="For trained logits: the --data of lowtide train, if given.",
            show_default="Python's standard library",
        ),
    ] = None,
    tp: TensorParallel = None,
    fsdp: FullySharded = None,
    device: DeviceOption = Device.auto,
    smoke: Smoke = False,
    out: Out = None,
) -> None:
    """Time fused linear + cross-entropy against its floor: the products that an exact method needs.

    Each row is one provider on one case: its median time, the ratio to the
    floor timed in turn with it, its peak memory beyond inputs, loss and
    gradients, and its errors against products in a wider dtype.

    With --tp each rank has all tokens and its part of the classes, whose
    products are its floor. The providers are lowtide and torch's loss_parallel.
    A row shows rank 0's times, and the largest peak and errors of all ranks.

    With --fsdp each rank has tokens of its own and its part of a float32 head.
    FSDP2 gathers the head for the loss, eager or lowtide's, and sums its
    gradient; after lowtide.shard_head the head stays divided. The floor is the
    same for all: the products of a rank's tokens with all classes.
    """
    on = choose_device(device)
    with joined(on):
        trained = logits is Logits.trained

        def check() -> None:
            if trained and fsdp is not None:
                raise typer.BadParameter("takes random logits: each rank has its own", param_hint="--fsdp")
            if trained != (checkpoint is not None):
                raise typer.BadParameter("goes together with --logits trained", param_hint="--checkpoint")
            if data is not None and not trained:
                raise typer.BadParameter("goes together with --logits trained", param_hint="--data")
            if trained and along:
                raise typer.BadParameter(
                    "takes random logits: a trained head has one shape", param_hint="--sweep"
                )
            check_ranks("linear-cross-entropy", tp=tp, fsdp=fsdp)

        from_first(check)
        usual = FSDP_CASE if fsdp is not None else SWEPT_CASE if trained or along else {}
        cases = _cases(on, case, smoke, usual)
        known: Sequence[Any] = PROVIDERS if tp is None else DIVIDED
        if fsdp is not None:
            known = FULLY_SHARDED
        budget_ms = BUDGET_MS
        if along:
            cases = [each for center in cases for each in sweep(center, [axis.value for axis in along])]
            if not provider and fsdp is None:
                known = [each for each in known if each.name in SWEPT]
            budget_ms = SWEEP_BUDGET_MS
        providers = choose(known, provider, smoke, "--provider")
        if checkpoint is not None:
            cases = trained_cases(cases, checkpoint, data)
        if tp is not None or fsdp is not None:
            cases = [divided(each, tokens=fsdp is not None) for each in cases]
        tables = [
            CaseTable(each.name, len(providers), rows(each, providers, mode, budget_ms=budget_ms))
            for each in cases
        ]
        print_tables(tables, on, smoke, out)


def options_(
    case: Annotated[Names, names_option("A shape", "B, on the CPU cpu-small")] = None,
    option: Annotated[Names, names_option("An option")] = None,
    mode: Annotated[
        Mode | None, typer.Option(help="Results and gradients, or results alone.", show_default="both")
    ] = None,
    workspace: Annotated[
        int | None, workspace_option("What a call with gradients may hold", f"{WORKSPACE // 2**20}MiB")
    ] = None,
    device: DeviceOption = Device.auto,
    smoke: Smoke = False,
    out: Out = None,
) -> None:
    """Time every option of the loss against the floor and against the plain loss.

    Each row is one option on one case: its median time, the ratio to the
    floor and the cost over the plain loss, both timed in turn with it, and its
    peak memory beyond inputs, results and gradients. The floor of results and
    gradients is three products, that of results alone is one.
    """
    on = choose_device(device)
    cases = _cases(on, case, smoke, OPTIONS_CASE)
    if workspace is not None and mode is Mode.FORWARD:
        raise typer.BadParameter("is for calls with gradients", param_hint="--workspace")
    by_mode = {each: options(each, workspace or WORKSPACE) for each in ([mode] if mode else Mode)}
    every = [entry for entries in by_mode.values() for entry in entries]
    chosen = {entry.name for entry in choose(every, option, smoke, "--option")}
    tables = []
    for one in cases:
        for one_mode, (plain, *others) in by_mode.items():
            entries = [entry for entry in (plain, *others) if entry.name in chosen]
            if entries:
                tables.append(CaseTable(one.name, len(entries), rows(one, entries, one_mode, plain)))
    print_tables(tables, on, smoke, out)


def chunked_loss(
    case: Annotated[Names, names_option("A shape", "A, on the CPU cpu")] = None,
    entry: Annotated[Names, names_option("A way to call it")] = None,
    device: DeviceOption = Device.auto,
    smoke: Smoke = False,
    out: Out = None,
) -> None:
    """Time the generic chunked loss with a plain cross-entropy against the dense step.

    Each row is one mode and chunk size, or a neighbour: its median time, the
    ratio to the floor and the cost over the dense step, both timed in turn with
    it, and its peak memory beyond inputs, the loss and gradients.
    """
    on = choose_device(device)
    cases = _cases(on, case, smoke, CHUNKED_CASE)
    every = chunked_entries(on)
    chosen = choose(every, entry, smoke, "--entry")
    tables = [CaseTable(each.name, len(chosen), rows(each, chosen, Mode.STEP, every[0])) for each in cases]
    print_tables(tables, on, smoke, out)


def distillation(
    case: Annotated[Names, names_option("A shape of both heads", "B-8192, on the CPU cpu-small")] = None,
    divergence: Annotated[Names, names_option("A divergence")] = None,
    provider: Annotated[Names, names_option("An implementation")] = None,
    device: DeviceOption = Device.auto,
    smoke: Smoke = False,
    out: Out = None,
) -> None:
    """Time the divergences of a student's and a teacher's head, forward and backward.

    Each row is one provider on one divergence: its median time, the ratio to
    the floor timed in turn with it, its peak memory beyond inputs, loss and
    gradients, and its errors against products in a wider dtype. The floor is
    four products: the logits of both heads, and the student's two gradients.
    """
    on = choose_device(device)
    cases = _cases(on, case, smoke, DISTILLATION_CASE)
    tables = []
    for each in cases:
        for one in choose(DIVERGENCES, divergence, smoke, "--divergence"):
            providers = choose(divergence_providers(one), provider, smoke, "--provider")
            name = f"{each.name}-{one.name}"
            tables.append(CaseTable(name, len(providers), divergence_rows(each, one, providers)))
    print_tables(tables, on, smoke, out)


def _cases(device: str, names: Names, smoke: bool, usual: Mapping[str, str]) -> list[LossCase]:
    """Return the named shapes of the loss, or the usual one of the device; none is usual: all."""
    if not names and not smoke and usual:
        names = [usual[device]]
    known = [case for case in CASES if case.device == device and (names or not case.by_name)]
    return choose(known, names, smoke, "--case")
