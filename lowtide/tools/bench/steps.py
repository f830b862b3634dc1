"""Measure whole steps of fine-tuning: a public model's forward, backward and optimizer step.

The weights are drawn at random: a step takes the same time. Each provider changes how one and the
same model computes its loss, and nothing else; the providers take turns. The learning rate is 0, so
that all compute the same loss. `tokens_per_second` is of the median step. `ratio` is the median of
the rounds' ratios to the eager step. `peak_bytes` counts parameters and optimizer states too.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from rich import box
from rich.console import Group
from rich.table import Table
from torch import Tensor, nn

import lowtide
from lowtide.memory import peak_memory
from lowtide.tools.bench.measure import alternate, attempted, quantiles, ratio
from lowtide.tools.bench.providers import Unavailable
from lowtide.tools.bench.table import Format, reasons, rounded, status
from lowtide.tools.environment import ENVIRONMENT, dtype_name, version
from lowtide.tools.errors import UserError

LENGTH, BATCH = 4096, 4
ROUNDS = 5
LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 5e5, "vocab_size": 128256}


@dataclass(frozen=True)
class StepCase:
    """Describe a model by the fields of its configuration, and the tokens of a step."""

    name: str
    source: str
    fields: dict[str, Any]
    batch: int = BATCH
    length: int = LENGTH
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    smoke: bool = False


STEP_CASES = (
    StepCase(
        "Qwen3-0.6B",
        "Qwen/Qwen3-0.6B",
        {"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "vocab_size": 151936}
        | {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
        | {"rope_theta": 1e6, "tie_word_embeddings": True},
    ),
    StepCase(
        "Llama-3.2-1B",
        "meta-llama/Llama-3.2-1B",
        {**LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True},
    ),
    StepCase(
        "Gemma-2-2B",
        "google/gemma-2-2b",
        {"model_type": "gemma2", "hidden_size": 2304, "intermediate_size": 9216, "vocab_size": 256000}
        | {"num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
    ),
    StepCase(
        "Llama-3.1-8B",
        "meta-llama/Llama-3.1-8B",
        {**LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False},
    ),
    StepCase(
        "smoke",
        "a Llama of two layers",
        {**LLAMA, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 1000}
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True},
        batch=2,
        length=32,
        device="cpu",
        dtype=torch.float32,
        smoke=True,
    ),
)


class StepProvider(NamedTuple):
    """Name a way to compute the loss, and the context in which the model computes it so."""

    name: str
    distribution: str
    applied: Callable[[nn.Module], AbstractContextManager[Any]]


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


STEP_PROVIDERS = (
    StepProvider("eager", "torch", lambda model: nullcontext()),
    StepProvider("lowtide", "lowtide", lowtide.defer_logits),
    StepProvider("lowtide-256MiB", "lowtide", partial(lowtide.defer_logits, workspace=256 * 2**20)),
    StepProvider("liger", "liger-kernel", _liger),
)


def step_rows(case: StepCase) -> Iterator[StepRow]:
    """Measure every provider on one model, in turns."""
    built, reason, failed = attempted(partial(_training, case), case.device)
    if built is None:
        yield from (StepRow(case, each, 0, None, reason, failed) for each in STEP_PROVIDERS)
        return
    parameters = sum(each.numel() for each in built[0].parameters())
    warmed = {
        each.name: attempted(partial(_warmed, case, *built, each), case.device) for each in STEP_PROVIDERS
    }
    running = [each for each in STEP_PROVIDERS if warmed[each.name][0] is not None]
    calls = [partial(_step, case, *built, each) for each in running]
    rounds = 1 if case.smoke else ROUNDS
    turns, reason, failed = attempted(partial(alternate, calls, rounds, case.device), case.device)
    spans = dict(zip((each.name for each in running), turns or ()))
    for each in STEP_PROVIDERS:
        first, *why = warmed[each.name]
        if first is None or turns is None:
            yield StepRow(case, each, parameters, None, *(why if first is None else (reason, failed)))
            continue
        own = spans[each.name]
        ms, p20, p80 = quantiles(own, 0.5, 0.2, 0.8)
        to_eager = ratio(own, spans["eager"]) if "eager" in spans else float("nan")
        figures = StepFigures(ms, p20, p80, to_eager, 1000 * case.batch * case.length / ms, *first)
        yield StepRow(case, each, parameters, figures, "", False)


def _step(case: StepCase, model: Any, optimizer: torch.optim.Optimizer, provider: StepProvider) -> Tensor:
    """Take a step of a provider, and return its loss. Each has the same tokens."""
    generator = torch.Generator(case.device).manual_seed(0)
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
    case: StepCase, model: Any, optimizer: torch.optim.Optimizer, provider: StepProvider
) -> tuple[int, float]:
    """Return the peak of a step, with parameters and optimizer, and its loss."""
    for _ in range(1 if case.smoke else 2):
        _step(case, model, optimizer, provider)
    with peak_memory(case.device) as peak:
        loss = _step(case, model, optimizer, provider)
    return peak.bytes + _held(model, optimizer), loss.item()


def _training(case: StepCase) -> tuple[Any, torch.optim.Optimizer]:
    """Return the case's model, in training mode with checkpointed layers, and its optimizer."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise UserError("lowtide bench steps needs Transformers: pip install 'lowtide[hf]'") from error
    fields = {name: value for name, value in case.fields.items() if name != "model_type"}
    config = AutoConfig.for_model(case.fields["model_type"], **fields, use_cache=False)
    torch.manual_seed(0)
    with torch.device(case.device):
        model = AutoModelForCausalLM.from_config(config, dtype=case.dtype)
    model.train()
    enable = getattr(model, "activation_checkpointing_enable", None)  # transformers 5.23
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    return model, torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)


def _held(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of parameters and optimizer states, which live from step to step."""
    states = [each for state in optimizer.state.values() for each in state.values()]
    return sum(each.nbytes for each in (*model.parameters(), *states) if isinstance(each, Tensor))


FIGURES = StepFigures._fields
COLUMNS = (
    *(*ENVIRONMENT, "model", "source", "parameters", "batch", "length", "dtype", "optimizer"),
    *("checkpointing", "provider", "version", "status", "reason", *FIGURES),
)


def record(row: StepRow) -> dict[str, object]:
    case = row.case
    fields: dict[str, object] = {
        "model": case.name,
        "source": case.source,
        "parameters": row.parameters,
        "batch": case.batch,
        "length": case.length,
        "dtype": dtype_name(case.dtype),
        "optimizer": "adamw",
        "checkpointing": True,
        "provider": row.provider.name,
        "version": version(row.provider.distribution),
        "status": status(row),
        "reason": row.reason,
    }
    return rounded(fields | (row.figures._asdict() if row.figures else {}))


def render(rows: Sequence[StepRow]) -> Group:
    """Return the table of one model, with the providers that did not run below."""
    case = rows[0].case
    billions = rows[0].parameters / 1e9
    title = f"{case.name}: {billions:.2f} billion parameters, {case.batch} x {case.length} tokens"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("provider")
    for heading in ("ms", "p20-p80", "ratio", "tokens/s", "peak GiB", "loss"):
        table.add_column(heading, justify="right", no_wrap=True)
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
