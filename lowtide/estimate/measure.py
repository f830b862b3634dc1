"""The same step on a CUDA device, and what its allocator says of it: what an estimate is checked against."""

import gc
from contextlib import ExitStack

import torch

from lowtide import defer_logits
from lowtide.estimate.cuda import Workspace
from lowtide.estimate.model import build
from lowtide.estimate.setting import Loss, Setting
from lowtide.train.config import UserError


def measure(setting: Setting, loss: Loss) -> int | None:
    """Bytes at the highest moment of the second step; None where the card has not enough."""
    if not torch.cuda.is_available():
        raise UserError("--measure: torch sees no CUDA device here; leave it out to estimate without one")
    before = torch.cuda.memory_allocated()
    try:
        return _steps(setting, loss) - before
    except torch.OutOfMemoryError:
        return None
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def _steps(setting: Setting, loss: Loss) -> int:
    with torch.device("cuda"), ExitStack() as stack:
        model = build(setting)
        if setting.workspace is not None:
            stack.enter_context(Workspace(setting.workspace))
        if loss is Loss.lowtide:
            stack.enter_context(defer_logits(model.module))
        optimizer = setting.optimizer.of(model.module.parameters())
        tokens_BT = torch.randint(model.classes, (setting.batch, setting.length))
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            with setting.dtype.precision("cuda"):
                value = model.loss(tokens_BT)
            value.backward()
            del value
            optimizer.step()
            optimizer.zero_grad()
        return torch.cuda.max_memory_allocated()
