"""Shard a model over ranks by FSDP2, also over ranks that do not exist.

torch's fake process group moves nothing, and lets one process be the first rank of many.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.core.errors import ArgumentError, ArgumentTypeError
from lowtide.distributed import shard_head
from lowtide.tools.errors import UserError
from lowtide.tools.estimate.setting import Loss, Optimizer, Setting


@contextlib.contextmanager
def imagined(ranks: int) -> Iterator[None]:
    """Make this process the first of so many ranks, whose shards are the largest."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    if dist.is_initialized():
        raise UserError("--fsdp: this process is a rank of a process group already")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def shard(module: nn.Module, setting: Setting, loss: Loss) -> None:
    """Shard each layer, then what is left, over all ranks of the process group.

    With `shard_head` lowtide's loss leaves the head's classes divided.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard  # slow to import

    if setting.optimizer is Optimizer.adafactor:
        raise UserError(
            "--fsdp: torch's Adafactor cannot step sharded parameters: give --optimizer adamw or sgd"
        )
    with _disable_current_modes():  # a mesh looks at its own tensor
        mesh = init_device_mesh("cpu", (setting.fsdp,))
    own: set[nn.Parameter] = set()
    if setting.shard_head and loss is Loss.lowtide:
        try:
            own = shard_head(module, mesh)
        except (ArgumentError, ArgumentTypeError) as reason:
            raise UserError(f"{setting.model}: --shard-head: {reason}") from reason
    given: dict[str, Any] = {"mesh": mesh, "ignored_params": own}
    for layer in _layers(module):
        fully_shard(layer, **given)
    fully_shard(module, **given)


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the elements of the outermost lists of modules, which are a transformer's layers."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from (each for each in child if any(True for _ in each.parameters()))
        else:
            yield from _layers(child)
