"""Measure the same step on a CUDA device, to check an estimate against its allocator."""

import gc

import torch

from lowtide.tools.errors import UserError
from lowtide.tools.estimate.setting import Loss, Setting
from lowtide.tools.estimate.training import training


def measure(setting: Setting, loss: Loss) -> int | None:
    """Return the bytes at the second step's peak, or None if the card's memory is too small."""
    if not torch.cuda.is_available():
        raise UserError("--measure: torch sees no CUDA device here; leave it out to estimate without one")
    gc.collect()  # Free the previous model.
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    try:
        with training(setting, loss, "cuda") as (step, _, _):
            step()
            torch.cuda.reset_peak_memory_stats()
            step()
            return torch.cuda.max_memory_allocated() - before
    except torch.OutOfMemoryError:
        return None
