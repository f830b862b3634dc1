"""Run the estimated step with data, and measure its peak on a CUDA device."""

import contextlib
import gc
from collections.abc import Callable, Iterator

import torch

from lowtide import defer_logits
from lowtide.tools.errors import UserError
from lowtide.tools.estimate.model import EstimatedModel, build
from lowtide.tools.estimate.ranks import shard
from lowtide.tools.estimate.setting import Loss, Setting
from lowtide.tools.estimate.tensor_parallel import divide


@contextlib.contextmanager
def training(
    setting: Setting, loss: Loss, device: str
) -> Iterator[tuple[Callable[[], None], EstimatedModel, torch.optim.Optimizer]]:
    """Yield a step, its model and its optimizer, for use within the block.

    The first step makes the optimizer's states, and compiles kernels.
    """
    with torch.device(device), contextlib.ExitStack() as stack:
        model = build(setting)
        if setting.tp > 1:
            divide(model.module, setting)
        if setting.fsdp > 1:
            shard(model.module, setting, loss)
        optimizer = setting.optimizer.of(model.module.parameters())
        tokens_BT = torch.randint(model.classes, (setting.batch, setting.length))
        if loss is Loss.lowtide:
            stack.enter_context(defer_logits(model.module, workspace=setting.workspace))

        def step() -> None:
            with setting.dtype.precision(device):
                value = model.loss(tokens_BT)
            value.backward()
            del value
            optimizer.step()
            optimizer.zero_grad()

        yield step, model, optimizer


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
