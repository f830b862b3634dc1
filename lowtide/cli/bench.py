"""Implement `lowtide bench`: time, memory and error of lowtide, torch and the installed peers."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol, TypeVar

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lowtide.cli.bench_pictures import draw as draw_figure
from lowtide.cli.bench_ranks import FullySharded, TensorParallel, check_ranks
from lowtide.cli.errors import Commands
from lowtide.cli.parameters import MOST_TOKENS, DeviceOption, output_file, output_picture, size_in_bytes
from lowtide.cli.parameters import workspace as workspace_option
from lowtide.cli.timeline import memory_timeline
from lowtide.tools.bench import compare as comparing
from lowtide.tools.bench.attention.cases import ATTENTION_CASES
from lowtide.tools.bench.attention.providers import ATTENTION_PROVIDERS
from lowtide.tools.bench.attention.real import RealCase, real_cases
from lowtide.tools.bench.attention.real_table import REAL_PROVIDERS, REAL_ROWS, real_rows
from lowtide.tools.bench.attention.real_table import draw as draw_real
from lowtide.tools.bench.attention.rows import attention_rows
from lowtide.tools.bench.attention.table import ATTENTION
from lowtide.tools.bench.cases import AXES, CASES, LossCase, divided, sweep
from lowtide.tools.bench.chunked import entries as chunked_entries
from lowtide.tools.bench.heads.data import HEADS
from lowtide.tools.bench.heads.rows import TOKENS, head_cases, head_providers, head_rows
from lowtide.tools.bench.heads.table import HEAD_ROWS
from lowtide.tools.bench.heads.table import draw as draw_heads
from lowtide.tools.bench.host import ATTENTION_CALLS, CALLS, HOST, SHAPES, attention_host_rows, host_rows
from lowtide.tools.bench.measure import BUDGET_MS, SWEEP_BUDGET_MS, Mode, rows
from lowtide.tools.bench.options import WORKSPACE, options
from lowtide.tools.bench.providers import PROVIDERS, SWEPT
from lowtide.tools.bench.ranks.fsdp import FULLY_SHARDED
from lowtide.tools.bench.ranks.tensor_parallel import DIVIDED
from lowtide.tools.bench.step_cases import STEP_CASES, under_fsdp
from lowtide.tools.bench.steps import FSDP_STEP_PROVIDERS, STEP_PROVIDERS, STEPS, step_rows
from lowtide.tools.bench.table import LOSS, CsvWriter, Format, records
from lowtide.tools.bench.trained import trained_cases
from lowtide.tools.environment import Device, Environment, choose_device
from lowtide.tools.errors import UserError
from lowtide.tools.files import growing_file
from lowtide.tools.ranks import from_first, is_first, joined

OPTIONS_CASE = {"cuda": "B", "cpu": "cpu-small"}
CHUNKED_CASE = {"cuda": "A", "cpu": "cpu"}
SWEPT_CASE = {"cuda": "A", "cpu": "cpu-small"}
FSDP_CASE = {"cuda": "B-4096", "cpu": "cpu-small"}
FSDP_STEP = "Llama-3.2-1B"

Axis = Enum("Axis", {axis: axis for axis in AXES}, type=str)  # type: ignore[misc]


class Logits(str, Enum):
    random = "random"
    trained = "trained"


class Named(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def smoke(self) -> bool | None: ...


NamedT = TypeVar("NamedT", bound=Named)

Names = list[str] | None
Smoke = Annotated[bool, typer.Option("--smoke", help="Run a tiny shape, and exit with 1 if a row fails.")]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", "--csv", parser=output_file, metavar="FILE", help="Write the rows to this CSV file."
    ),
]


def _names(what: str, show_default: str = "all") -> Any:
    return typer.Option(help=f"{what} by name; repeatable.", show_default=show_default)


app = typer.Typer(cls=Commands, no_args_is_help=True)
app.command("memory-timeline")(memory_timeline)


@app.callback()
def bench() -> None:
    """Measure lowtide beside torch and the peers that are installed."""


@app.command("linear-cross-entropy")
def linear_cross_entropy(
    case: Annotated[Names, _names("A shape", "all of the device")] = None,
    provider: Annotated[Names, _names("An implementation")] = None,
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
        providers = _choose(known, provider, smoke, "--provider")
        if checkpoint is not None:
            cases = trained_cases(cases, checkpoint, data)
        if tp is not None or fsdp is not None:
            cases = [divided(each, tokens=fsdp is not None) for each in cases]
        tables = [
            _Table(each, len(providers), rows(each, providers, mode, budget_ms=budget_ms)) for each in cases
        ]
        _print(tables, on, smoke, out)


@app.command("heads")
def heads_(
    heads: Annotated[
        str | None, typer.Option(help="Heads by name, between commas.", metavar="NAMES", show_default="all")
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            help="Numbers of tokens, between commas.",
            metavar="NUMBERS",
            show_default="256,1024,4096,16384,65536, on the CPU 256",
        ),
    ] = None,
    workspaces: Annotated[
        str,
        typer.Option(
            help="lowtide's workspaces, between commas: default, or a size such as 256MiB.", metavar="SIZES"
        ),
    ] = "default,256MiB",
    provider: Annotated[Names, _names("An implementation, as lowtide-256MiB or eager")] = None,
    device: DeviceOption = Device.auto,
    smoke: Smoke = False,
    out: Out = None,
    plot: Annotated[
        Path | None,
        typer.Option(parser=output_picture, metavar="FILE", help="Draw the ratios, .svg or .png."),
    ] = None,
) -> None:
    """Time the loss on the heads of public models, from GPT-2 to Kimi K2.

    Each row of the CSV is one provider on one head and number of tokens, with
    the engine that `lowtide doctor` names. Ratios are to the aligned floor: the
    three products with features and classes rounded up to multiples of 8. A
    second column has the floor of the unpadded operands, for which cuBLAS has
    slower kernels. Errors are against float64, where that takes seconds at most.
    """
    on = choose_device(device)
    chosen = _choose(HEADS, heads.split(",") if heads else None, smoke, "--heads")
    counts = _counts(tokens) if tokens else TOKENS["cpu" if smoke else on]
    sizes = [None if each == "default" else size_in_bytes(each) for each in workspaces.split(",")]
    providers = _choose(head_providers(sizes), provider, smoke, "--provider")
    cases = head_cases(chosen, counts, on)
    measured = (row for case in cases for row in head_rows(case, providers))
    table = _Table(cases[0], len(cases) * len(providers), measured)
    every = _print([table], on, smoke, out, HEAD_ROWS)
    if plot is not None:
        draw_heads(records(every, Environment.of(on), HEAD_ROWS), plot)
        Console().print(f"picture: {plot}", soft_wrap=True)


def _counts(words: str) -> list[int]:
    try:
        counts = [int(word) for word in words.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1 or max(counts) > MOST_TOKENS:
        raise typer.BadParameter(f"{words!r} must be numbers from 1 to {MOST_TOKENS:,} between commas")
    return counts


@app.command("options")
def options_(
    case: Annotated[Names, _names("A shape", "B, on the CPU cpu-small")] = None,
    option: Annotated[Names, _names("An option")] = None,
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
    chosen = {entry.name for entry in _choose(every, option, smoke, "--option")}
    tables = []
    for one_case in cases:
        for one_mode, (plain, *others) in by_mode.items():
            entries = [entry for entry in (plain, *others) if entry.name in chosen]
            if entries:
                tables.append(_Table(one_case, len(entries), rows(one_case, entries, one_mode, plain)))
    _print(tables, on, smoke, out)


@app.command("chunked-loss")
def chunked_loss(
    case: Annotated[Names, _names("A shape", "A, on the CPU cpu")] = None,
    entry: Annotated[Names, _names("A way to call it")] = None,
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
    chosen = _choose(every, entry, smoke, "--entry")
    tables = [_Table(each, len(chosen), rows(each, chosen, Mode.STEP, every[0])) for each in cases]
    _print(tables, on, smoke, out)


@app.command("attention")
def attention(
    case: Annotated[Names, _names("A shape", "all of the device but the longest")] = None,
    provider: Annotated[Names, _names("An implementation")] = None,
    real: Annotated[bool, typer.Option("--real", help="Shapes of public models, in one table.")] = False,
    flex: Annotated[
        str | None,
        typer.Option(
            help="With --real: time FlexAttention on these shapes, between commas, or on all. "
            "It compiles for 10 to 20 seconds each.",
            metavar="NAMES",
            show_default="none",
        ),
    ] = None,
    device: DeviceOption = Device.auto,
    smoke: Smoke = False,
    out: Out = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            parser=output_picture, metavar="FILE", help="With --real: draw the ratios, .svg or .png."
        ),
    ] = None,
) -> None:
    """Time attention, forward and backward, beside torch's own and the peers.

    Each row is one provider on one case: its times, its rates, what they are of
    the best peer's (forward, backward, both together), its peak memory beyond
    inputs, result and gradients, and its errors against products in a wider
    dtype. The providers of a case take turns. The cases million, half-million
    and quarter-million run by name only.

    With --real, cases are the shapes and options of public models, from Swin to
    Llama 3. Ratios are to the quickest of torch's own kernels, and the rows say
    which way lowtide takes and how long each pass takes the host.
    """
    on = choose_device(device)
    if real:
        _real(_choose(real_cases(on), case, smoke, "--case"), provider, flex, on, smoke, out, plot)
        return
    for name, value in (("--flex", flex), ("--plot", plot)):
        if value is not None:
            raise typer.BadParameter("goes together with --real", param_hint=name)
    known = [one for one in ATTENTION_CASES if one.device == on and (case or not one.by_name)]
    cases = _choose(known, case, smoke, "--case")
    chosen = _choose(ATTENTION_PROVIDERS, provider, smoke, "--provider")
    tables = []
    for one in cases:
        providers = [each for each in chosen if provider or each.name not in one.without]
        tables.append(_Table(one, len(providers), attention_rows(one, providers)))
    _print(tables, on, smoke, out, ATTENTION)


def _real(
    cases: Sequence[RealCase],
    provider: Names,
    flex: str | None,
    device: str,
    smoke: bool,
    out: Path | None,
    plot: Path | None,
) -> None:
    chosen = _choose(ATTENTION_PROVIDERS, provider or list(REAL_PROVIDERS), smoke, "--provider")
    compiled = _choose(ATTENTION_PROVIDERS, ["flex"], smoke, "--provider")
    of_flex = cases if flex == "all" else _choose(cases, flex.split(","), smoke, "--flex") if flex else []
    measured = (
        row for one in cases for row in real_rows(one, [*chosen, *(compiled if one in of_flex else [])])
    )
    total = len(cases) * len(chosen) + len(of_flex)
    every = _print([_Table(cases[0], total, measured)], device, smoke, out, REAL_ROWS)
    if plot is not None:
        draw_real(records(every, Environment.of(device), REAL_ROWS), plot)
        Console().print(f"picture: {plot}", soft_wrap=True)


class _Shape(NamedTuple):
    name: str
    smoke: bool | None = None


@app.command("host")
def host(device: DeviceOption = Device.auto, smoke: Smoke = False, out: Out = None) -> None:
    """Time what a call of each operator takes of the host, forward and backward.

    Each row is one operator at one number of tokens and head, in turn with the
    same in plain torch: the median time until Python goes on. A card computes
    meanwhile, and a small call waits for the host.
    """
    on = choose_device(device)
    shapes = SHAPES["cpu" if smoke else on]
    calls = 3 if smoke else CALLS
    tables = [_Table(_Shape(str(shape)), 6, host_rows(shape, on, calls)) for shape in shapes]
    tables.append(_Table(_Shape("attention"), len(ATTENTION_CALLS[on]), attention_host_rows(on, calls)))
    _print(tables, on, smoke, out, HOST)


@app.command("steps")
def steps(
    case: Annotated[Names, _names("A model", f"all, with --fsdp {FSDP_STEP}")] = None,
    provider: Annotated[Names, _names("A way to compute the loss")] = None,
    fsdp: FullySharded = None,
    device: DeviceOption = Device.auto,
    smoke: Smoke = False,
    out: Out = None,
) -> None:
    """Time whole steps of fine-tuning public models, with weights drawn at random.

    Each row is one way to compute the loss of the same model, in turn with the
    others: the step's median time, the ratio to the eager step, tokens a second,
    and the peak memory with parameters and optimizer. Layers are checkpointed.

    With --fsdp each layer is a unit of FSDP2, float32 and computed in bfloat16,
    and the head is not tied with the embedding. One row is of a model whose
    head lowtide.shard_head divides. Times are rank 0's, tokens those of all
    ranks, peaks the largest of any rank.
    """
    on = "cpu" if smoke else choose_device(device)
    with joined(on):

        def check() -> None:
            check_ranks("steps", fsdp=fsdp)
            if on == "cpu" and not smoke:
                raise UserError("needs a CUDA device; --smoke runs a small model on the CPU")

        from_first(check)
        if fsdp is not None and not smoke:
            case = case or [FSDP_STEP]
        chosen = _choose([each for each in STEP_CASES if each.device == on], case, smoke, "--case")
        known = STEP_PROVIDERS if fsdp is None else FSDP_STEP_PROVIDERS
        providers = _choose(known, provider, smoke, "--provider")
        if fsdp is not None:
            chosen = [under_fsdp(each) for each in chosen]
        tables = [_Table(each, len(providers), step_rows(each, providers)) for each in chosen]
        _print(tables, on, smoke, out, STEPS)


@app.command("draw")
def draw(
    rows: Annotated[
        Path, typer.Argument(help="A CSV of `linear-cross-entropy --sweep`, `heads` or `attention --real`.")
    ],
    out: Annotated[
        Path, typer.Option(parser=output_picture, metavar="FILE", help="The figure, .svg or .png.")
    ],
) -> None:
    """Draw a CSV of measured rows, from the file alone.

    Of a sweep: throughput, memory and accuracy along each axis. Of heads and of
    public models' attention: the ratios that their tables are of.
    """
    draw_figure(rows, out)
    Console().print(f"figure: {out}", soft_wrap=True)


@app.command("compare")
def compare(
    before: Annotated[Path, typer.Argument(help="A CSV of `lowtide bench`.")],
    after: Annotated[Path, typer.Argument(help="Another of the same command.")],
    percent: Annotated[float, typer.Option(min=0, help="The change that is allowed.")] = 2.0,
) -> None:
    """Compare times, ratios and memory of two CSVs, and exit with 1 if one has changed.

    Rows are compared that agree in case, sizes, dtype, options and provider. A
    row that only one file has, or that ran in one alone, is a change too.
    Ratios are to a floor timed in the same run: they depend less on clocks
    than times do.
    """
    found = comparing.compare(before, after)
    changed = found.beyond(percent)
    console = Console(highlight=False)
    for line in found.surroundings:
        console.print(Text(line), soft_wrap=True)
    if changed:
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column("row")
        table.add_column("figure")
        for heading in ("before", "after", "change"):
            table.add_column(heading, justify="right", no_wrap=True)
        for one in changed:
            figures = (f"{one.before:,.6g}", f"{one.after:,.6g}", f"{one.percent:+.1f} %")
            table.add_row(Text(one.row), one.figure, *figures)
        console.print(table)
    for line in found.unmatched:
        console.print(Text(line), soft_wrap=True)
    of = f"{len(changed)} of {len(found.changes)} figures changed by more than {percent:g} %"
    console.print(of + f", {len(found.unmatched)} rows without a counterpart" * bool(found.unmatched))
    raise typer.Exit(int(bool(changed or found.unmatched)))


class _Table(NamedTuple):
    case: Named
    total: int
    rows: Iterator[Any]  # Lazy: a row is measured, and its tensors made, when it is asked for.


def _print(
    tables: Sequence[_Table], device: str, smoke: bool, out: Path | None, form: Format = LOSS
) -> list[Any]:
    """Measure, print the tables and return all rows; a smoke run exits with 1 if a row failed."""
    console = Console(quiet=not is_first())
    if not console.is_terminal:
        console.width = form.width
    every: list[Any] = []
    with contextlib.ExitStack() as stack:
        writer = None
        if out is not None and is_first():
            writer = CsvWriter(stack.enter_context(growing_file(out)), Environment.of(device), form)
        for table in tables:
            measured: list[Any] = []
            with console.status(table.case.name) as spinner:
                for row in table.rows:
                    measured.append(row)
                    if writer is not None:
                        writer.write(row)
                    spinner.update(f"{table.case.name}: {len(measured)} of {table.total} rows")
            console.print(form.render(measured))
            every += measured
    if smoke and any(row.failed for row in every):
        raise typer.Exit(1)
    return every


def _cases(device: str, names: Names, smoke: bool, usual: Mapping[str, str]) -> list[LossCase]:
    """Return the named shapes of the loss, or the usual one of the device; none is usual: all."""
    if not names and not smoke and usual:
        names = [usual[device]]
    known = [case for case in CASES if case.device == device and (names or not case.by_name)]
    return _choose(known, names, smoke, "--case")


def _choose(known: Sequence[NamedT], names: Names, smoke: bool, option: str) -> list[NamedT]:
    """Return the entries of these names in the order given, or all of this kind of run."""
    if not names:
        return [entry for entry in known if entry.smoke in (None, smoke)]
    by_name = {entry.name: entry for entry in known}
    for name in names:
        if name not in by_name:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(by_name)}", param_hint=option)
    return [by_name[name] for name in names]
