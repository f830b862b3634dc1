"""List entries that measure what lowtide.chunked_loss costs, for `measure.rows`.

The plain entry, the dense cross-entropy of the case, comes first. Each other is one way to call the
chunked loss, or an alternative to it.

Legend: N tokens, D features, V classes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lowtide import linear_cross_entropy
from lowtide.ops.chunked_loss import chunked_loss
from lowtide.ops.chunked_loss.api import Mode
from lowtide.tools.bench.cases import IGNORE_INDEX, Case, Inputs
from lowtide.tools.bench.providers import Call
from lowtide.tools.eager import eager_loss

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]

CHUNK_SIZES = {"cuda": (1024, 2048, 4096), "cpu": (128, 256)}


@dataclass(frozen=True)
class Chunked:
    name: str
    loss: Loss
    distribution: str = "lowtide"
    smoke: bool | None = None
    workspace: int | None = None

    def call(self, case: Case, inputs: Inputs) -> Call:
        return Call(lambda: (self.loss(*inputs),), tuple(each for each in inputs[:2] if each.requires_grad))


def entries(device: str) -> tuple[Chunked, ...]:
    """Return the entries, the dense step first."""
    modes: tuple[Mode, ...] = ("gradient_in_forward", "recompute")
    chunked = [
        Chunked(f"{mode}-{size}", partial(_chunked, mode, size))
        for mode in modes
        for size in CHUNK_SIZES[device]
    ]
    return (
        Chunked("dense", eager_loss, "torch"),
        *chunked,
        Chunked("by-hand", partial(_by_hand, CHUNK_SIZES[device][-1]), "torch"),
        Chunked("linear_cross_entropy", partial(linear_cross_entropy, ignore_index=IGNORE_INDEX)),
    )


def _sum(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), target, ignore_index=IGNORE_INDEX, reduction="sum")


def _chunked(mode: Mode, chunk_size: int, input_ND: Tensor, weight_VD: Tensor, target_N: Tensor) -> Tensor:
    head = partial(F.linear, weight=weight_VD)
    loss = chunked_loss(_sum, head, input_ND, target_N, chunk_size=chunk_size, mode=mode)
    return loss / (target_N != IGNORE_INDEX).sum()


def _by_hand(chunk_size: int, input_ND: Tensor, weight_VD: Tensor, target_N: Tensor) -> Tensor:
    """Run the loop that people write: each chunk is checkpointed, and recomputed in backward."""

    def one(x_CD: Tensor, target_C: Tensor) -> Tensor:
        return _sum(F.linear(x_CD, weight_VD), target_C)

    chunks = zip(input_ND.split(chunk_size), target_N.split(chunk_size))
    total = sum(checkpoint(one, x_CD, target_C, use_reentrant=False) for x_CD, target_C in chunks)
    return total / (target_N != IGNORE_INDEX).sum()


__all__ = ["CHUNK_SIZES", "Chunked", "entries"]
