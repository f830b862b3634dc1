"""Make one process the first of many ranks, and shard a model over them by FSDP2.

The other ranks do not exist: torch's fake process group moves nothing.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.core.errors import ArgumentError, ArgumentTypeError
from lowtide.tools.errors import UserError
from lowtide.tools.estimate.setting import Loss, Optimizer, Setting
from lowtide.tools.layers import shard_layers


@contextlib.contextmanager
def imagined(setting: Setting) -> Iterator[None]:
    """Make this process the first rank of the setting, whose shards are the largest."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    if dist.is_initialized():
        option = "--fsdp" if setting.fsdp > 1 else "--tp"
        raise UserError(f"{option}: this process is a rank of a process group already")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=setting.ranks)
    try:
        with _hidden():
            yield
    finally:
        dist.destroy_process_group()


def mesh_of(setting: Setting, name: str) -> Any:
    """Return the mesh of "fsdp" or "tp"; neighbours share a group of tensor parallelism."""
    from torch.distributed.device_mesh import init_device_mesh

    with _disable_current_modes():  # a mesh looks at its own tensor
        if setting.fsdp == 1 or setting.tp == 1:
            return init_device_mesh("cpu", (setting.ranks,))
        names = ("fsdp", "tp")
        return init_device_mesh("cpu", (setting.fsdp, setting.tp), mesh_dim_names=names)[name]


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


@contextlib.contextmanager
def _hidden() -> Iterator[None]:
    """Hide from all modes the tensors of DTensor and meshes that a real rank does not hold.

    DTensor finds the shape of a result with tensors of the whole size, which are fake on real
    ranks, too. A mesh computes with the numbers of its ranks, which are in a real tensor.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    own = [(ShardingPropagator, "_propagate_tensor_meta_non_cached"), (DeviceMesh, "_concatenate")]
    before = [(owner, name, vars(owner)[name]) for owner, name in own if name in vars(owner)]

    def hidden(function: Any) -> Any:
        @functools.wraps(function)
        def run(*arguments: Any, **options: Any) -> Any:
            with _disable_current_modes():
                return function(*arguments, **options)

        return run

    for owner, name, function in before:
        if isinstance(function, staticmethod):
            setattr(owner, name, staticmethod(hidden(function.__func__)))
        else:
            setattr(owner, name, hidden(function))
    try:
        yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)
