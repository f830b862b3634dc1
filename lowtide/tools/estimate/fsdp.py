"""Shard a model over ranks by FSDP2."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from lowtide.core.errors import ArgumentError, ArgumentTypeError
from lowtide.distributed import shard_head
from lowtide.tools.errors import UserError
from lowtide.tools.estimate.ranks import mesh_of
from lowtide.tools.estimate.setting import Loss, Optimizer, Setting


def shard(module: nn.Module, setting: Setting, loss: Loss) -> None:
    """Shard each layer, then what is left, over ranks with tokens of their own.

    With `shard_head` lowtide's loss leaves the head's classes divided.
    """
    from torch.distributed.fsdp import fully_shard  # slow to import

    if setting.optimizer is Optimizer.adafactor:
        raise UserError(
            "--fsdp: torch's Adafactor cannot step sharded parameters: give --optimizer adamw or sgd"
        )
    mesh = mesh_of(setting, "fsdp")
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
