"""Define a training run: every choice that shapes it, in one frozen object."""

from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

from lowtide.tools.errors import UserError

HEAD_WIDTH = 64
CHECKPOINT_FORMAT = 1  # Increase it when the model changes, or what is saved of it.

# Sizes that train in a few minutes on two cores, or on one GPU, with memory for the eager loss too.
SIZES = {
    "cpu": {"width": 128, "depth": 2, "context": 256, "batch": 12, "steps": 50, "save_every": 25},
    "cuda": {"width": 512, "depth": 8, "context": 1024, "batch": 16, "steps": 500, "save_every": 100},
}


class LossChoice(str, Enum):
    lowtide = "lowtide"
    eager = "eager"
    both = "both"


class Parallel(str, Enum):
    data = "data"
    tensor = "tensor"
    shard_head = "shard_head"


@dataclass(frozen=True)
class Config:
    loss: str
    device: str
    out: Path
    data: Path | None
    vocab_size: int
    width: int
    depth: int
    context: int
    batch: int
    steps: int
    save_every: int
    tied: bool
    seed: int
    parallel: Parallel | None = None
    """Say how the ranks share the run; None for one process."""
    ranks: int = 1

    def __post_init__(self) -> None:
        if self.width % HEAD_WIDTH:
            raise UserError(
                f"--width must be a multiple of {HEAD_WIDTH}, the width of an attention head: {self.width}"
            )
        if self.parallel in (Parallel.data, Parallel.shard_head) and self.batch % self.ranks:
            raise UserError(
                f"--batch must be a multiple of the {self.ranks} ranks, which share its sequences "
                f"evenly: {self.batch}"
            )
        if self.parallel is Parallel.tensor and 4 * self.width % self.ranks:
            raise UserError(
                f"--width must be a multiple of the {self.ranks} ranks, which divide the MLP's features "
                f"evenly: {self.width}"
            )
        if self.parallel and self.parallel is not Parallel.data and self.tied:
            raise UserError(
                f"--tied goes together with --parallel data: an embedding needs all rows on each rank, "
                f"and {self.parallel.value} divides them"
            )

    @property
    def name(self) -> str:
        return f"{self.parallel.value} on {self.ranks_name}" if self.parallel else self.loss

    @property
    def ranks_name(self) -> str:
        return f"{self.ranks} rank{'s' * (self.ranks != 1)}" if self.parallel else "one process"

    @property
    def directory(self) -> Path:
        """Return where this run keeps its files; each loss has its own directory in --out."""
        return self.out / (f"{self.parallel.value}-{self.ranks}" if self.parallel else self.loss)

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.context

    def identity(self, text: str) -> dict:
        """Return what a checkpoint must agree with to be continued; `text` names the corpus.

        The number of steps is not part of it: 100 steps continued to 200 are the run of 200.
        """
        shaping = ("device", "vocab_size", "width", "depth", "context", "batch", "tied", "seed")
        chosen = {name: value for name, value in asdict(self).items() if name in shaping}
        return {"format": CHECKPOINT_FORMAT} | chosen | {"text": text}


def choose_sizes(device: str, **asked: int | None) -> dict[str, int]:
    """Return the device's default sizes, with the user's in their place."""
    return SIZES[device] | {name: size for name, size in asked.items() if size is not None}
