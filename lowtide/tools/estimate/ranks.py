"""Make one process the first of many ranks, the others of which do not exist.

torch's fake process group moves nothing.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.tools.errors import UserError
from lowtide.tools.estimate.setting import Setting


@contextlib.contextmanager
def imagined(setting: Setting) -> Iterator[None]:
    """Make this process the first rank of the setting, whose shards are the largest."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    if dist.is_initialized():
        option = "--fsdp" if setting.fsdp > 1 else "--tp"
        raise UserError(f"{option}: this process is a rank of a process group already")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=setting.ranks)
    try:
        with _shapes_hidden():
            yield
    finally:
        dist.destroy_process_group()


def mesh_of(setting: Setting) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    with _disable_current_modes():  # a mesh looks at its own tensor
        return init_device_mesh("cpu", (setting.ranks,))


@contextlib.contextmanager
def _shapes_hidden() -> Iterator[None]:
    """Hide from all modes the whole tensors by which DTensor learns the shape of a result.

    They are fake on real ranks, too, and no rank holds them.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    learn = ShardingPropagator._propagate_tensor_meta_non_cached

    def learn_hidden(self: Any, schema: Any) -> Any:
        with _disable_current_modes():
            return learn(self, schema)

    ShardingPropagator._propagate_tensor_meta_non_cached = learn_hidden
    try:
        yield
    finally:
        ShardingPropagator._propagate_tensor_meta_non_cached = learn
