"""Run a training from text to sample: corpus, steps under a progress bar, checkpoints, a sample."""

from dataclasses import dataclass

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from lowtide.tools.demo.config import Config
from lowtide.tools.demo.data import Corpus, load_corpus
from lowtide.tools.demo.model import generate
from lowtide.tools.demo.trainer import Step, Trainer
from lowtide.tools.ranks import from_first, is_first

SAMPLE_PROMPT = 16
SAMPLE_TOKENS = 64


@dataclass(frozen=True)
class Run:
    """Hold what the report needs, small enough to return from another process."""

    config: Config
    history: list[Step]
    validation_loss: float


def train(config: Config) -> Run:
    console = Console(highlight=False, quiet=not is_first())
    with console.status("reading the text"):
        corpus = from_first(lambda: load_corpus(config.data, config.vocab_size, config.context))
    trainer = make_trainer(config, corpus)
    trainer.resume()
    run_steps(trainer, console)
    title = f"sample after {len(trainer.history)} steps of {config.name}"
    console.print(Panel(sample(trainer, corpus), title=title, title_align="left"))
    return Run(config, trainer.history, trainer.validation_loss())


def make_trainer(config: Config, corpus: Corpus) -> Trainer:
    if config.parallel is None:
        return Trainer(config, corpus)
    from lowtide.tools.demo.parallel import RanksTrainer  # takes a torch with torch.distributed

    return RanksTrainer(config, corpus)


def run_steps(trainer: Trainer, console: Console) -> None:
    config = trainer.config
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=12),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(config.name, total=config.steps, completed=len(trainer.history), state="")
        while len(trainer.history) < config.steps:
            trainer.step()
            progress.update(bar, advance=1, state=describe(trainer))
            done = len(trainer.history)
            if done % config.save_every == 0 or done == config.steps:
                trainer.save()
                console.print(f"{config.name}  step {done}  {describe(trainer)}")


def describe(trainer: Trainer) -> str:
    step = trainer.history[-1]
    peak = next(step.peak_bytes for step in reversed(trainer.history) if step.peak_bytes is not None)
    tokens = trainer.config.tokens_per_step / step.seconds
    return f"loss {step.loss:.4f}  {tokens:,.0f} tokens/s  peak {peak / 1e6:,.0f} MB"


def sample(trainer: Trainer, corpus: Corpus) -> Text:
    """Return the beginning of the held-out text, and the model's continuation."""
    prompt = corpus.valid[:SAMPLE_PROMPT].tolist()
    config = trainer.config
    tokens = generate(trainer.model, prompt, SAMPLE_TOKENS, config.context, config.seed)
    given, written = corpus.tokenizer.decode(prompt), corpus.tokenizer.decode(tokens[len(prompt) :])
    return Text.assemble((given, "dim"), written)
