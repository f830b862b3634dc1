"""Measure whole steps of fine-tuning: a public model's forward, backward and optimizer step.

The weights are drawn at random: a step takes as long as with trained ones. All providers take turns
on the same model, and change only how it computes its loss. The learning rate is 0, so that all
compute the same loss. `tokens_per_second` is of the median step. `ratio` is the median of
the rounds' ratios to the eager step. `peak_bytes` counts parameters and optimizer states too.

Under FSDP2 each rank has a batch of its own. Two models of the same weights take their turns, for
`lowtide.shard_head` changes one for good. Times are this rank's, `tokens_per_second` counts the
tokens of all ranks, `peak_bytes` is the largest of any rank, `step_loss` the mean of the ranks'.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Group
from torch import Tensor, nn

import lowtide
from lowtide.core.collectives import part_of_rank
from lowtide.memory import peak_memory
from lowtide.tools.bench.measure import attempted
from lowtide.tools.bench.providers import Unavailable
from lowtide.tools.bench.steps.cases import StepCase
from lowtide.tools.bench.table import Format, outcome, reasons, rounded
from lowtide.tools.bench.timing import alternate, quantiles, ratio
from lowtide.tools.environment import ENVIRONMENT, dtype_name
from lowtide.tools.errors import UserError
from lowtide.tools.layers import checkpoint_layers, shard_layers
from lowtide.tools.tables import new_table

ROUNDS = 5

Training = tuple[Any, torch.optim.Optimizer]  # a model and its optimizer


class StepProvider(NamedTuple):
    """Name a way to compute the loss, and the context in which the model computes it so."""

    name: str
    distribution: str
    applied: Callable[[nn.Module], AbstractContextManager[Any]]
    shards_head: bool = False
    """Whether its model has gone through `lowtide.shard_head`."""


class StepFigures(NamedTuple):
    """Hold what was measured of a step."""

    ms: float
    ms_p20: float
    ms_p80: float
    ratio: float
    tokens_per_second: float
    peak_bytes: int
    step_loss: float


class StepRow(NamedTuple):
    """Hold one provider on one model: its figures, or why there are none."""

    case: StepCase
    provider: StepProvider
    parameters: int
    figures: StepFigures | None
    reason: str
    failed: bool


@contextmanager
def _liger(model: nn.Module) -> Iterator[None]:
    """Replace the model's forward by Liger's, with its fused loss and none of its other kernels."""
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError as error:
        raise Unavailable("liger-kernel is not installed") from error
    config: Any = model.config
    if model.device.type != "cuda":
        raise Unavailable("needs a CUDA device")
    apply = MODEL_TYPE_TO_APPLY_LIGER_FN[config.model_type]
    flags = [name for name in inspect.signature(apply).parameters if name != "model"]
    apply(**{name: name == "fused_linear_cross_entropy" for name in flags}, model=model)
    try:
        yield
    finally:
        del model.forward


EAGER = StepProvider("eager", "torch", lambda model: nullcontext())
LOWTIDE = StepProvider("lowtide", "lowtide", lowtide.defer_logits)
LIGER = StepProvider("liger", "liger-kernel", _liger)

STEP_PROVIDERS = (
    *(EAGER, LOWTIDE),
    StepProvider("lowtide-256MiB", "lowtide", partial(lowtide.defer_logits, workspace=256 * 2**20)),
    LIGER,
)
FSDP_STEP_PROVIDERS = (
    *(EAGER, LOWTIDE),
    StepProvider("lowtide-shard-head", "lowtide", lowtide.defer_logits, shards_head=True),
    LIGER,
)


def step_rows(case: StepCase, providers: Sequence[StepProvider] = STEP_PROVIDERS) -> Iterator[StepRow]:
    """Measure the providers on one model, in turns."""
    tried = partial(attempted, device=case.device, alone=case.ranks is None)
    built, reason, failed = tried(lambda: _trainings(case, providers))
    if built is None:
        yield from (StepRow(case, each, 0, None, reason, failed) for each in providers)
        return
    steps = {each.name: partial(_step, case, *built[each.shards_head], each) for each in providers}
    parameters = sum(each.numel() for each in next(iter(built.values()))[0].parameters())
    warmed = {
        each.name: tried(partial(_warmed, case, steps[each.name], *built[each.shards_head]))
        for each in providers
    }
    running = [name for name, (first, *_) in warmed.items() if first is not None]
    rounds = 1 if case.smoke else ROUNDS
    calls = [steps[name] for name in running]
    turns, reason, failed = tried(lambda: alternate(calls, rounds, case.device))
    spans = dict(zip(running, turns or ()))
    for each in providers:
        first, *why = warmed[each.name]
        if first is None or turns is None:
            yield StepRow(case, each, parameters, None, *(why if first is None else (reason, failed)))
            continue
        own = spans[each.name]
        ms, p20, p80 = quantiles(own, 0.5, 0.2, 0.8)
        to_eager = ratio(own, spans["eager"]) if "eager" in spans else float("nan")
        tokens = (case.ranks or 1) * case.batch * case.length
        figures = StepFigures(ms, p20, p80, to_eager, 1000 * tokens / ms, *first)
        yield StepRow(case, each, parameters, figures, "", False)


def _step(case: StepCase, model: Any, optimizer: torch.optim.Optimizer, provider: StepProvider) -> Tensor:
    """Take a step of a provider; return its loss. All have the same tokens, each rank its own."""
    generator = torch.Generator(case.device).manual_seed(case.rank)
    sizes = case.batch, case.length
    ids = torch.randint(model.config.vocab_size, sizes, generator=generator, device=case.device)
    with provider.applied(model):
        try:
            loss: Tensor = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
        finally:
            optimizer.zero_grad()
    return loss.detach()


def _warmed(
    case: StepCase, step: Callable[[], Tensor], model: Any, optimizer: torch.optim.Optimizer
) -> tuple[int, float]:
    """Return the peak of a step, with parameters and optimizer, and its loss."""
    for _ in range(1 if case.smoke else 2):
        step()
    with peak_memory(case.device) as peak:
        loss = step()
    own = (peak.bytes + _held(model, optimizer), loss.item())
    if case.ranks is None:
        return own
    ranks: list[Any] = [None] * case.ranks
    dist.all_gather_object(ranks, own)
    peaks, losses = zip(*ranks)
    return max(peaks), sum(losses) / case.ranks


def _trainings(case: StepCase, providers: Sequence[StepProvider]) -> dict[bool, Training]:
    """Return the models that the providers need, by whether the head is sharded for good."""
    return {
        shards_head: _training(case, shards_head)
        for shards_head in sorted({each.shards_head for each in providers})
    }


def _training(case: StepCase, shards_head: bool) -> Training:
    """Return the case's model, in training mode with checkpointed layers, and its optimizer.

    Under FSDP2 it has float32 parameters, is computed in the case's dtype, and reduces gradients in
    float32.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise UserError("lowtide bench steps needs Transformers: pip install 'lowtide[hf]'") from error
    fields = {name: value for name, value in case.fields.items() if name != "model_type"}
    config = AutoConfig.for_model(case.fields["model_type"], **fields, use_cache=False)
    torch.manual_seed(0)
    with torch.device(case.device):
        dtype = case.dtype if case.ranks is None else torch.float32
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.train()
    checkpoint_layers(model)
    if case.ranks is not None:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh(case.device, (case.ranks,))
        shard_layers(model, mesh, shards_head=shards_head, dtype=case.dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)


def _held(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return this rank's bytes of parameters and optimizer states, which live from step to step."""
    states = [each for state in optimizer.state.values() for each in state.values()]
    tensors = (each for each in (*model.parameters(), *states) if isinstance(each, Tensor))
    return sum(part_of_rank(each).nbytes for each in tensors)


FIGURES = StepFigures._fields
COLUMNS = (
    *(*ENVIRONMENT, "model", "source", "parameters", "ranks", "batch", "length", "dtype", "optimizer"),
    *("checkpointing", "provider", "version", "status", "reason", *FIGURES),
)


def record(row: StepRow) -> dict[str, object]:
    case = row.case
    fields: dict[str, object] = {
        "model": case.name,
        "source": case.source,
        "parameters": row.parameters,
        "ranks": case.ranks,
        "batch": case.batch,
        "length": case.length,
        "dtype": dtype_name(case.dtype),
        "optimizer": "adamw",
        "checkpointing": True,
        **outcome(row),
    }
    return rounded(fields | (row.figures._asdict() if row.figures else {}))


def render(rows: Sequence[StepRow]) -> Group:
    """Return the table of one model, with the providers that did not run below."""
    case = rows[0].case
    billions = rows[0].parameters / 1e9
    title = f"{case.name}: {billions:.2f} billion parameters, {case.batch} x {case.length} tokens"
    if case.ranks is not None:
        title += f" on each of {case.ranks} ranks"
    headings = ("ms", "p20-p80", "ratio", "tokens/s", "peak GiB", "loss")
    table = new_table(title, ["provider"], headings)
    for row in rows:
        if (figures := row.figures) is not None:
            table.add_row(
                row.provider.name,
                f"{figures.ms:.1f}",
                f"{figures.ms_p20:.1f}-{figures.ms_p80:.1f}",
                f"{figures.ratio:.3f}",
                f"{figures.tokens_per_second:,.0f}",
                f"{figures.peak_bytes / 2**30:.2f}",
                f"{figures.step_loss:.4f}",
            )
    return Group(table, *reasons(rows))


STEPS: Any = Format(COLUMNS, record, render)
