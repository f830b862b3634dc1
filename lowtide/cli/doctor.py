"""Implement `lowtide doctor`: report what this machine has, and how it computes a call."""

import time
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from lowtide.cli.shared.errors import Commands
from lowtide.cli.shared.parameters import Argument, Autocast, Bias, DType, Reduction, Softcap, refuse_given
from lowtide.cli.shared.parameters import workspace as workspace_option
from lowtide.tools.doctor import attention as of_attention
from lowtide.tools.doctor import linear_cross_entropy as of_loss
from lowtide.tools.doctor import selftest as selftest_of_calls
from lowtide.tools.doctor.attention import Layout, Mask
from lowtide.tools.doctor.cpu import cpu
from lowtide.tools.doctor.environment import environment
from lowtide.tools.environment import AnyDevice, choose_device, dtype_name
from lowtide.tools.tables import new_table

MOST_SIZE = 2**31 - 1

Dtype = Annotated[DType, typer.Option(help="The dtype of the tensors.")]
Backend = Annotated[str, Argument]
DeviceOption = Annotated[AnyDevice, typer.Option(help="Auto: the GPU if there is one.")]


def _size(help: str | None, least: int = 0, show_default: bool | str = True) -> Any:
    return typer.Option(min=least, max=MOST_SIZE, help=help, show_default=show_default)


app = typer.Typer(cls=Commands, invoke_without_command=True)


@app.callback()
def doctor(
    context: typer.Context,
    selftest: Annotated[
        bool, typer.Option("--selftest", help="Run fifty calls, and compare them with torch in float64.")
    ] = False,
    device: Annotated[
        AnyDevice, typer.Option(help="The device of --selftest. Auto: the GPU if there is one.")
    ] = AnyDevice.auto,
) -> None:
    """Say what this machine has, and which engine or backend runs a call on it.

    Without a command, doctor prints which engine runs the loss here, what the CPU
    has for bfloat16 and how its threads wait, versions and devices, and which
    backend of attention runs which calls. The commands below describe one call.
    They ask the functions that also choose when the call runs. They compute
    nothing, but may compile a CPU's bfloat16 products.

    With --selftest, doctor runs calls in less than a minute, and prints a report
    to paste into an issue. Exit status 1 means that a result was wrong.
    """
    if not selftest:
        refuse_given(context, ["device"], "goes together with --selftest; commands have their own")
    elif context.invoked_subcommand is not None:
        raise typer.BadParameter("runs by itself, without a command", param_hint="--selftest")
    else:
        raise typer.Exit(_selftest(choose_device(device)))
    if context.invoked_subcommand is None:
        console = _console()
        N, D, V = of_loss.USUAL
        title = f"linear_cross_entropy, {N:,} x {D:,} x {V:,}, backend='auto'"
        _print_lines(console, title, ("call", "engine", "kernels", "why"), of_loss.table())
        _print(console, "This CPU", cpu())
        _print(console, "This machine", environment())
        title = "memory_efficient_attention, backend='auto'"
        _print_lines(console, title, ("call", "on the CPU", "on CUDA"), of_attention.table())


@app.command("attention")
def attention(
    context: typer.Context,
    batch: Annotated[int, _size("B: sequences.")] = 1,
    queries: Annotated[int, _size("M: queries in a sequence.")] = 4096,
    keys: Annotated[int | None, _size("N: keys in a sequence.", show_default="as many as queries")] = None,
    heads: Annotated[int, _size("H: heads of the queries.")] = 16,
    key_heads: Annotated[int | None, _size(None, show_default="as many as heads")] = None,
    features: Annotated[int, _size("K: features of a head.")] = 64,
    value_features: Annotated[
        int | None, _size("E: features of a value.", show_default="as many as features")
    ] = None,
    dtype: Dtype = DType.bfloat16,
    device: DeviceOption = AnyDevice.auto,
    layout: Annotated[
        Layout, typer.Option(help="The layout of the tensors; BHMK is that of torch's SDPA.")
    ] = Layout.BMHK,
    mask: Annotated[Mask | None, typer.Option(help="A mask of attn_bias.", show_default="none")] = None,
    bias: Annotated[
        str | None, typer.Option(help="Shape of a bias, as 1,H,M,N or 1,16,1,4096.", show_default="none")
    ] = None,
    bias_gradient: Annotated[bool, typer.Option(help="Whether the bias needs a gradient.")] = True,
    dropout: Annotated[float, typer.Option(help="Rate of dropout.")] = 0.0,
    softcap: Softcap = None,
    window: Annotated[
        tuple[int, int] | None,
        typer.Option(
            help="Keys seen to the left and right of a query; -1 for no limit.", show_default="none"
        ),
    ] = None,
    logsumexp: Annotated[bool, typer.Option("--logsumexp", help="Return the logsumexp as well.")] = False,
    backend: Backend = "auto",
) -> None:
    """Show which backend memory_efficient_attention takes for a call, and why."""
    sizes = {"B": batch, "H": heads, "M": queries, "N": queries if keys is None else keys}
    if bias is None:
        refuse_given(context, ["bias_gradient"], "goes together with --bias")
    call = of_attention.AskedAttentionCall(
        B=batch,
        M=queries,
        N=keys,
        H=heads,
        G=key_heads,
        K=features,
        E=value_features,
        dtype=dtype.torch,
        device=_device(device),
        layout=layout,
        mask=mask,
        bias=None if bias is None else _shape(bias, sizes),
        bias_gradient=bias_gradient,
        dropout=dropout,
        softcap=softcap,
        window=window,
        with_logsumexp=logsumexp,
        backend=backend,
    )
    found = call.choice()
    heads_of_keys = heads if key_heads is None else key_heads
    title = (
        f"memory_efficient_attention: B {batch} M {queries} N {sizes['N']} H {heads}/{heads_of_keys} "
        f"K {features} {dtype.value} on {call.device}"
    )
    _print(_console(), title, {"backend": found.backend, "why": found.reason})


@app.command("linear-cross-entropy")
def linear_cross_entropy(
    tokens: Annotated[int, _size("N.")] = 8192,
    features: Annotated[int, _size("D.", 1)] = 4096,
    classes: Annotated[int, _size("V.", 1)] = 128_256,
    dtype: Dtype = DType.bfloat16,
    device: DeviceOption = AnyDevice.auto,
    bias: Bias = False,
    gradients: Annotated[bool, typer.Option(help="Whether the call needs gradients.")] = True,
    softcap: Softcap = None,
    label_smoothing: Annotated[float, Argument] = 0.0,
    logit_scale: Annotated[float | None, typer.Option(show_default="none")] = None,
    z_loss: Annotated[float, Argument] = 0.0,
    weight: Annotated[bool, typer.Option("--weight", help="With class weights.")] = False,
    row_weight: Annotated[
        bool, typer.Option("--row-weight", help="With weights of rows; they change no plan.")
    ] = False,
    reduction: Reduction = "mean",
    workspace: Annotated[int | None, workspace_option("What the call may hold")] = None,
    backend: Backend = "auto",
    autocast: Autocast = None,
    probabilities: Annotated[
        DType | None,
        typer.Option(help="The dtype of targets that are probabilities.", show_default="class indices"),
    ] = None,
    ranks: Annotated[
        int,
        _size(
            "Ranks that the classes are divided over, by a DTensor, by group=, or by shard_head (then "
            "with --tokens-sharded).",
            1,
        ),
    ] = 1,
    tokens_sharded: Annotated[
        bool, typer.Option("--tokens-sharded", help="The ranks divide the tokens as well.")
    ] = False,
    segments: Annotated[
        int | None, _size("Segments of the classes; the bits then depend on no number of ranks.", 1, "none")
    ] = None,
    log_probs: Annotated[
        bool, typer.Option("--log-probs", help="Describe linear_log_probs with a gradient of log_prob.")
    ] = False,
) -> None:
    """Show how linear_cross_entropy computes a call, and in what pieces.

    Options have the names of the function's arguments. A z-loss, row weights
    and a logit scale are part of the coefficients of a row. They change only the
    bytes that --tokens-sharded moves. With --ranks the command says what a rank
    holds, and which collectives move how many bytes.
    """
    call = of_loss.AskedLossCall(
        tokens,
        features,
        classes,
        dtype=dtype.torch,
        device=_device(device),
        bias=bias,
        gradients=gradients,
        softcap=softcap,
        label_smoothing=label_smoothing,
        logit_scale=logit_scale,
        z_loss=z_loss,
        weight=weight,
        reduction=reduction,
        workspace=workspace,
        backend=backend,
        autocast=None if autocast is None else autocast.torch,
        probabilities=None if probabilities is None else probabilities.torch,
        row_weight=row_weight,
        ranks=ranks,
        tokens_sharded=tokens_sharded,
        segments=segments,
        log_probs=log_probs,
    )
    found = call.describe()
    name = "linear_log_probs" if log_probs else "linear_cross_entropy"
    title = f"{name}: {tokens} x {features} x {classes} {dtype.value} on {call.device}"
    _print(_console(), title, found)


def _selftest(device: str) -> int:
    """Print the machine, each case and a summary as plain text; return the exit status."""
    started, wrong = time.monotonic(), 0
    for name, value in environment().items():
        print(f"{name}: {value}")
    print(f"\n{'':5}{'call on ' + device:34}{'dtype':10}{'error':>9}{'allowed':>9}{'ms':>7}")
    for one in selftest_of_calls.run(device):
        wrong += not one.passed
        figures = one.reason or f"{one.error:9.1e}{one.allowed:9.1e}{1000 * one.seconds:7.0f}"
        verdict = "ok" if one.passed else "FAIL"
        print(f"{verdict:5}{one.case.name:34}{dtype_name(one.case.dtype):10}{figures}", flush=True)
    total = len(selftest_of_calls.cases_on(device))
    print(f"\n{total - wrong} of {total} calls are right, in {time.monotonic() - started:.0f} s")
    return int(wrong > 0)


def _print(console: Console, title: str, found: Mapping[str, str]) -> None:
    table = new_table(title, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for name, value in found.items():
        table.add_row(name, Text(value))  # Text, because brackets would be markup.
    console.print(table)


def _print_lines(
    console: Console, title: str, headings: Iterable[str], lines: Iterable[Iterable[str]]
) -> None:
    table = new_table(title, headings)
    for line in lines:
        table.add_row(*map(Text, line))
    console.print(table)


def _console() -> Console:
    console = Console()
    if not console.is_terminal:
        console.width = 160  # Output to a file has no width, and its sentences should not be wrapped.
    return console


def _device(device: AnyDevice) -> str:
    """Return the device to describe; this machine need not have it."""
    return choose_device(device) if device is AnyDevice.auto else device.value


def _shape(words: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    try:
        shape = tuple(sizes[word] if word in sizes else int(word) for word in words.split(","))
    except ValueError:
        shape = (-1,)
    if not 0 <= min(shape) <= max(shape) <= MOST_SIZE:
        raise typer.BadParameter(
            f"{words!r} must be sizes or {', '.join(sizes)} between commas", param_hint="--bias"
        )
    return shape
