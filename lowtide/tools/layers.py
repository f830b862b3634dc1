"""Shard a model over data-parallel ranks by FSDP2, layer by layer."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from lowtide.distributed import shard_head


def shard_layers(module: nn.Module, mesh: Any, *, shards_head: bool, policy: Any = None) -> None:
    """Shard each layer, then the rest; with `shards_head` the head's classes stay divided.

    `policy` is a MixedPrecisionPolicy; None computes in the parameters' dtype.
    """
    from torch.distributed.fsdp import fully_shard  # slow to import

    own: set[nn.Parameter] = shard_head(module, mesh) if shards_head else set()
    given: dict[str, Any] = {"mesh": mesh, "ignored_params": own}
    if policy is not None:
        given["mp_policy"] = policy
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
