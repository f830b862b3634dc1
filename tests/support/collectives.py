"""Count the collectives of a program that carry as much as its head."""

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.ops.linear_cross_entropy.ranks.messages import MESSAGE_BYTES


class Collectives(TorchDispatchMode):
    """Gathers and reductions of at least `size` numbers, and all collectives."""

    def __init__(self, size):
        super().__init__()
        self.size, self.counts = size, {"gathers": 0, "reductions": 0, "all": 0}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        if function.namespace in ("c10d", "_c10d_functional") and "wait" not in name:
            self.counts["all"] += 1
        if "allgather" in name.replace("_into_tensor", "") or "all_gather" in name:
            gathered = _first(args[0])
            self.counts["gathers"] += gathered.numel() >= self.size and not _is_message(gathered)
        if "reduce_scatter" in name:
            reduced = _first(args[function.namespace == "c10d"])
            self.counts["reductions"] += reduced.numel() >= self.size
        return function(*args, **(kwargs or {}))


def _first(tensors):
    while isinstance(tensors, (list, tuple)):
        tensors = tensors[0]
    return tensors


def _is_message(gathered):
    """The ranks of a call tell each other as many bytes as a small head has."""
    return gathered.dtype == torch.uint8 and gathered.numel() == dist.get_world_size() * MESSAGE_BYTES
