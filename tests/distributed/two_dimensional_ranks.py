"""What test_two_dimensional.py runs as four processes: FSDP2 over one dimension of a mesh, tensor
parallelism over the other. A scenario returns the relative error of each gradient, against one
process.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import lowtide
from tests.support.ranks import mesh_of

KINDS = ("inside root", "outside root", "outside own", "deferred root")


class Model(nn.Module):
    """An embedding, an MLP and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(25, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.lm_head = nn.Linear(8, 25, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor, how: str = "") -> Tensor:
        hidden = self.down(self.up(self.embedding(tokens)).tanh())
        if how == "outside":
            return hidden
        if how == "inside":
            return lowtide.linear_cross_entropy(hidden, self.lm_head.weight, labels)
        return F.cross_entropy(self.lm_head(hidden).flatten(0, -2), labels.flatten())


def run(kind: str, rank: int) -> dict[str, Any]:
    how, unit = kind.split()
    torch.manual_seed(0)
    whole, model = Model(), Model()
    model.load_state_dict(whole.state_dict())
    mesh = mesh_of(2, 2, mesh_dim_names=("data", "tensor"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh["tensor"], plan)
    if unit == "own":
        fully_shard(model.lm_head, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    tokens, labels = torch.randint(25, (2, 2, 3, 5))
    batch = tokens[mesh.get_local_rank("data")], labels[mesh.get_local_rank("data")]
    deferral = lowtide.defer_logits(model) if how == "deferred" else None
    loss = model(*batch, how=how)
    if how == "outside":
        loss = lowtide.linear_cross_entropy(loss, model.lm_head.weight, batch[1])
    loss.backward()
    (sum(whole(*each) for each in zip(tokens, labels)) / 2).backward()
    errors = {}
    for (name, found), expected in zip(model.named_parameters(), whole.parameters()):
        gradient = found.grad.full_tensor()
        errors[name] = float((gradient - expected.grad).norm() / expected.grad.norm())
    return {"errors": errors, "fused": deferral.fused if deferral else 1}
