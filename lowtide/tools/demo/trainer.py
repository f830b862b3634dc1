"""Train one run: steps, their time and memory, and checkpoints to continue from."""

import contextlib
import csv
import time
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from lowtide import linear_cross_entropy
from lowtide.memory import peak_memory
from lowtide.tools import files
from lowtide.tools.demo.config import Config
from lowtide.tools.demo.data import Corpus, batch
from lowtide.tools.demo.model import GPT
from lowtide.tools.eager import eager_loss
from lowtide.tools.errors import UserError
from lowtide.tools.layers import parameter_groups
from lowtide.tools.ranks import from_first, is_first

CHECKPOINT, LOG = "checkpoint.pt", "log.csv"
PEAK_RATE = 4e-3
WARMUP = 10
MEASURE_EVERY = 10
VALIDATION_BATCHES = 4


LOSSES: dict[str, Callable[..., Tensor]] = {"lowtide": linear_cross_entropy, "eager": eager_loss}


@dataclass(frozen=True)
class Step:
    number: int
    loss: float
    seconds: float
    # Peak memory of the loss; None in steps that do not measure it, since measuring takes time.
    peak_bytes: int | None


def learning_rate(number: int) -> float:
    """Return a linear warmup, then the inverse square root of the step.

    It has no final step, so that a finished run may be continued.
    """
    return PEAK_RATE * min((number + 1) / WARMUP, (WARMUP / (number + 1)) ** 0.5)


class Trainer:
    """Hold model, optimizer and history: all that a checkpoint saves.

    No generator's state is saved: a batch is a function of (seed, step), and the model draws
    nothing.
    """

    def __init__(self, config: Config, corpus: Corpus) -> None:
        torch.manual_seed(config.seed)
        self.config, self.corpus = config, corpus
        self.loss = LOSSES[config.loss]
        self.model = self.built()
        groups = parameter_groups(self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            groups, lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        self.history: list[Step] = []

    def built(self) -> GPT:
        config = self.config
        return GPT(config.vocab_size, config.width, config.depth, config.tied).to(config.device)

    def step(self) -> None:
        number = len(self.history)
        started = time.perf_counter()
        tokens, targets = self.batch(self.corpus.train, number)
        with self.precision():
            hidden = self.model(tokens)

        # The loss step by itself: head and loss, forward and backward, down to the hidden states.
        # Its peak includes the gradients that it makes, those of the head and of the hidden states.
        leaf = hidden.detach().requires_grad_()
        measured = number % MEASURE_EVERY == 0
        with peak_memory(self.config.device) if measured else contextlib.nullcontext() as peak:
            with self.precision():
                loss = self.loss(leaf, self.model.head.weight, targets)
            loss.backward()
        hidden.backward(leaf.grad)

        self.clip_gradients()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(number)
        self.optimizer.step()
        self.optimizer.zero_grad()
        # Read last: on a GPU this waits for all queued work, and the clock must too.
        value = self.mean(loss)
        self.history.append(Step(number, value, time.perf_counter() - started, peak.bytes if peak else None))

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Return the mean over a few batches of the held-out text, chosen by the seed alone."""
        total = 0.0
        for number in range(VALIDATION_BATCHES):
            tokens, targets = self.batch(self.corpus.valid, number)
            with self.precision():
                total += self.mean(self.loss(self.model(tokens), self.model.head.weight, targets))
        return total / VALIDATION_BATCHES

    def batch(self, ids: Tensor, number: int) -> tuple[Tensor, Tensor]:
        config = self.config
        tokens, targets = batch(ids, rows=config.batch, context=config.context, seed=config.seed, step=number)
        return tokens.to(config.device), targets.to(config.device)

    def clip_gradients(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def mean(self, loss: Tensor) -> float:
        """Return the loss of all tokens."""
        return loss.item()

    def precision(self) -> torch.autocast:
        """Return bfloat16 autocast over float32 weights on a GPU; float32 throughout on a CPU."""
        return torch.autocast(self.config.device, torch.bfloat16, enabled=self.config.device == "cuda")

    def save(self) -> None:
        content = {
            "identity": self.config.identity(self.corpus.name),
            **self.state(),
            "history": [asdict(step) for step in self.history],
        }
        if is_first():
            self.write(content)

    def state(self) -> dict[str, Any]:
        """Return what the model and the optimizer hold."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])

    def write(self, content: dict[str, Any]) -> None:
        files.save(content, self.config.directory / CHECKPOINT)
        with files.whole_file(self.config.directory / LOG, "w") as file:
            log = csv.writer(file, lineterminator="\n")
            log.writerow(field.name for field in fields(Step))
            log.writerows(astuple(step) for step in self.history)

    def resume(self) -> None:
        """Continue from the checkpoint, if any; refuse another run's without changing it."""
        saved = from_first(lambda: read_checkpoint(self.config, self.corpus.name))
        if saved is None:
            return
        try:
            self.load_state(saved)
            self.history = [Step(**step) for step in saved["history"]]
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as problem:
            raise unreadable(self.config) from problem


ADVICE = "nothing was changed; give another --out, or move the file away"


def read_checkpoint(config: Config, corpus_name: str) -> dict | None:
    """Return the checkpoint to continue from, or None; raise an error if it is another run's."""
    path = config.directory / CHECKPOINT
    try:
        saved = files.load(path)
        theirs, done = dict(saved["identity"]), len(saved["history"])
    except FileNotFoundError:
        return None
    except (files.DamagedFile, KeyError, TypeError, ValueError) as problem:
        raise unreadable(config) from problem

    identity = config.identity(corpus_name)
    differences = [
        f"{name} {theirs.get(name)}, not {identity[name]}"
        for name in identity
        if theirs.get(name) != identity[name]
    ]
    if differences:
        raise UserError(f"{path} is the checkpoint of another run ({'; '.join(differences)}): {ADVICE}")
    if done > config.steps:
        raise UserError(f"{path} is already at step {done}: give --steps {done} or more, or another --out")
    return saved


def unreadable(config: Config) -> UserError:
    path = config.directory / CHECKPOINT
    return UserError(f"{path} cannot be read as a checkpoint of lowtide train: {ADVICE}")
