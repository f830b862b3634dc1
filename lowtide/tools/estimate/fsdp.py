"""Shard a model over ranks by FSDP2."""

from torch import nn

from lowtide.core.errors import ArgumentError, ArgumentTypeError
from lowtide.tools.errors import UserError
from lowtide.tools.estimate.ranks import mesh_of
from lowtide.tools.estimate.setting import Loss, Optimizer, Setting
from lowtide.tools.layers import shard_layers


def shard(module: nn.Module, setting: Setting, loss: Loss) -> None:
    """Shard each layer, then what is left, over ranks with tokens of their own.

    With `shard_head` lowtide's loss leaves the head's classes divided.
    """
    if setting.optimizer is Optimizer.adafactor:
        raise UserError(
            "--fsdp: torch's Adafactor cannot step sharded parameters: give --optimizer adamw or sgd"
        )
    shards_head = setting.shard_head and loss is Loss.lowtide
    try:
        shard_layers(module, mesh_of(setting, "fsdp"), shards_head=shards_head)
    except (ArgumentError, ArgumentTypeError) as reason:  # the head cannot be sharded
        raise UserError(f"{setting.model}: --shard-head: {reason}") from reason
