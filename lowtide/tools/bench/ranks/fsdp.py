"""Define the losses of a head that FSDP2 shards, or that `lowtide.shard_head` leaves divided.

The head is a float32 parameter, computed in the case's dtype, with its gradient reduced in float32:
what training by FSDP2 has. A step begins and ends with shards: gathering the head and reducing its
gradient are part of it.

Shapes: N tokens of this rank, D features, V classes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide.tools.bench.cases import IGNORE_INDEX, Inputs, LossCase
from lowtide.tools.bench.providers import TimedCall
from lowtide.tools.layers import shard_layers


@dataclass(frozen=True)
class ShardedHead:
    """Name a way to compute the loss of (input_ND, head, target_N)."""

    name: str
    distribution: str
    loss: Callable[[Tensor, Any, Tensor], Tensor]
    shards_head: bool = False
    workspace: int | None = None

    def call(self, case: LossCase, inputs: Inputs) -> TimedCall:
        input_ND, weight_VD, target_N = inputs
        head = sharded_head(case, weight_VD.detach(), self.shards_head)

        def run() -> tuple[Tensor, ...]:
            loss = self.loss(input_ND, head, target_N)
            if not torch.is_grad_enabled():
                return (loss,)
            loss.backward()  # FSDP2 reduces gradients behind backward alone
            return loss.detach(), _taken(input_ND), _taken(head.weight).to_local()

        return TimedCall(run, leaves=())


def sharded_head(case: LossCase, weight_VD: Tensor, shards_head: bool) -> nn.Linear:
    from torch.distributed.device_mesh import init_device_mesh

    V, D = weight_VD.shape
    head = nn.Linear(D, V, bias=False, device="meta")
    head.weight = nn.Parameter(weight_VD.to(torch.float32, copy=True))
    mesh = init_device_mesh(case.device, (case.ranks,))
    if shards_head:
        lowtide.shard_head(head, mesh, head=head)
    else:
        shard_layers(head, mesh, shards_head=False, dtype=case.dtype)
    return head


def _taken(leaf: Any) -> Any:
    """Return a leaf's gradient, and leave none."""
    gradient, leaf.grad = leaf.grad, None
    return gradient


def _eager(input_ND: Tensor, head: Any, target_N: Tensor) -> Tensor:
    return F.cross_entropy(head(input_ND).float(), target_N, ignore_index=IGNORE_INDEX)


def _lowtide(input_ND: Tensor, head: Any, target_N: Tensor) -> Tensor:
    return lowtide.linear_cross_entropy(input_ND, head.weight, target_N, ignore_index=IGNORE_INDEX)


FULLY_SHARDED = (
    ShardedHead("eager", "torch", _eager),
    ShardedHead("lowtide", "lowtide", _lowtide),
    ShardedHead("lowtide-shard-head", "lowtide", _lowtide, shards_head=True),
)
