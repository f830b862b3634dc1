"""Trains a head of lowtide.shard_head as four processes, for test_hybrid.py: under FSDP2 that
replicates over one dimension of a mesh and shards over the other (HSDP), and under DDP. A scenario
returns the relative error of each parameter after some steps, against one process.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import lowtide
from tests.support.ranks import generator, mesh_of, whole

MAX_NORM = 0.3  # below the norm of each step


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.body = nn.Embedding(25, 8), nn.Linear(8, 8)
        self.lm_head = nn.Linear(8, 25, bias=False)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.body(self.embedding(tokens)).tanh())
        return logits


def run(kind: str, rank: int) -> dict[str, Any]:
    """Train with the head's mesh that the kind says, and alone on the tokens of all ranks."""
    mesh = mesh_of(2, 2, mesh_dim_names=("replicate", "shard"))
    model, alone = Model(), Model()
    own = lowtide.shard_head(model, head_mesh(kind, mesh))
    wrapped = model
    if "ddp" in kind:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["lm_head.weight"])
        wrapped = DistributedDataParallel(model)
    else:
        fully_shard(model.body, mesh=mesh)
        fully_shard(model, mesh=mesh, ignored_params=own)
    if "real" in kind:
        model(torch.zeros(1, 3, dtype=torch.long))
    deferral = lowtide.defer_logits(model)
    tokens, labels = torch.randint(25, (2, 3, 4, 2, 5), generator=generator(1))
    for step in range(3):
        for each, own_tokens in ((wrapped, rank), (alone, slice(None))):
            own_labels = labels[step, own_tokens].flatten()
            F.cross_entropy(each(tokens[step, own_tokens]).flatten(0, -2), own_labels).backward()
        if "clipped" in kind:
            clip(model)
            nn.utils.clip_grad_norm_(alone.parameters(), MAX_NORM)
        with torch.no_grad():
            for each in (*model.parameters(), *alone.parameters()):
                each -= each.grad
                each.grad = None
    errors = {
        name: ((whole(each) - expected).abs().max() / expected.abs().max()).item()
        for (name, each), expected in zip(model.named_parameters(), alone.parameters())
    }
    return {"errors": errors, "fused": deferral.fused}


def head_mesh(kind: str, mesh: DeviceMesh) -> DeviceMesh:
    return mesh["shard"] if "shard" in kind else mesh._flatten("dp")


def clip(model: nn.Module) -> None:
    """Clip the gradients of parameters on two meshes, as docs/howto/distributed.md shows."""
    own = {model.lm_head.weight}
    parts = [[each for each in model.parameters() if (each in own) == heads] for heads in (True, False)]
    norms = [nn.utils.get_total_norm([each.grad for each in part]).full_tensor() for part in parts]
    total = torch.stack(norms).norm()
    for part in parts:
        nn.utils.clip_grads_with_norm_(part, MAX_NORM, total)
