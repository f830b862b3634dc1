"""Shard or checkpoint a model's layers; group parameters for an optimizer."""

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

import torch
from torch import nn

from lowtide.core.collectives import is_dtensor
from lowtide.distributed import shard_head


def shard_layers(
    module: nn.Module, mesh: Any, *, shards_head: bool, dtype: torch.dtype | None = None
) -> None:
    """Shard each layer by FSDP2, then the rest; with `shards_head` the head's classes stay divided.

    Products are computed in `dtype`, with gradients reduced in float32; None is the parameters'
    dtype for both.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # slow to import

    own: set[nn.Parameter] = shard_head(module, mesh) if shards_head else set()
    given: dict[str, Any] = {"mesh": mesh, "ignored_params": own}
    if dtype is not None:
        given["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
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


def checkpoint_layers(model: Any) -> None:
    """Let a model of Transformers keep one hidden state a layer, and compute the rest again."""
    # Before transformers 5.20 or so the method has the second name.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def parameter_groups(parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Return divided and whole parameters apart: torch's operations take no lists of both."""
    by_kind = sorted(parameters, key=is_dtensor)
    return [{"params": [*each]} for _, each in groupby(by_kind, is_dtensor)]
