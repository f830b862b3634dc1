"""List the providers by which `measure.rows` measures the time and memory of lowtide.chunked_loss.

The first is the plain one, the dense cross-entropy of the case. Each of the others is one way to
call the chunked loss, or an alternative to it.

Legend: N tokens, D features, V classes.
"""

from functools import partial

import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lowtide import linear_cross_entropy
from lowtide.ops.chunked_loss import chunked_loss
from lowtide.ops.chunked_loss.api import Mode
from lowtide.tools.bench.cases import IGNORE_INDEX, LossCase
from lowtide.tools.bench.providers import Loss, Provider
from lowtide.tools.eager import eager_loss

CHUNK_SIZES = {"cuda": (1024, 2048, 4096), "cpu": (128, 256)}


def entries(device: str) -> tuple[Provider, ...]:
    """Return the providers, with the dense step first."""
    sizes = CHUNK_SIZES[device]
    modes: tuple[Mode, ...] = ("gradient_in_forward", "recompute")
    chunked = {f"{mode}-{size}": partial(_chunked, mode, size) for mode in modes for size in sizes}
    fused = partial(linear_cross_entropy, ignore_index=IGNORE_INDEX)
    return (
        Provider("dense", "torch", partial(_given, eager_loss)),
        *(Provider(name, "lowtide", partial(_given, loss)) for name, loss in chunked.items()),
        Provider("by-hand", "torch", partial(_given, partial(_by_hand, sizes[-1]))),
        Provider("linear_cross_entropy", "lowtide", partial(_given, fused)),
    )


def _given(loss: Loss, case: LossCase) -> Loss:
    return loss


def _sum(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), target, ignore_index=IGNORE_INDEX, reduction="sum")


def _chunked(mode: Mode, chunk_size: int, input_ND: Tensor, weight_VD: Tensor, target_N: Tensor) -> Tensor:
    head = partial(F.linear, weight=weight_VD)
    loss = chunked_loss(_sum, head, input_ND, target_N, chunk_size=chunk_size, mode=mode)
    return loss / (target_N != IGNORE_INDEX).sum()


def _by_hand(chunk_size: int, input_ND: Tensor, weight_VD: Tensor, target_N: Tensor) -> Tensor:
    """Run the loop that users write by hand: each chunk is checkpointed."""

    def one(x_CD: Tensor, target_C: Tensor) -> Tensor:
        return _sum(F.linear(x_CD, weight_VD), target_C)

    chunks = zip(input_ND.split(chunk_size), target_N.split(chunk_size))
    total = sum(checkpoint(one, x_CD, target_C, use_reentrant=False) for x_CD, target_C in chunks)
    return total / (target_N != IGNORE_INDEX).sum()
