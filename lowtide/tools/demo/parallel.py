"""Train one run on several ranks, which share its tokens or its classes.

Seed, batches and steps are those of one process, and so is the loss, up to rounding.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lowtide import shard_head
from lowtide.core.collectives import is_dtensor
from lowtide.tools.demo.config import Parallel
from lowtide.tools.demo.model import GPT
from lowtide.tools.demo.trainer import Trainer


class RanksTrainer(Trainer):
    """Train on all ranks of the default process group; rank 0 writes.

    A checkpoint holds whole tensors.
    """

    def built(self) -> GPT:
        model, parallel = super().built(), self.config.parallel
        mesh = init_device_mesh(self.config.device, (dist.get_world_size(),))
        if parallel is Parallel.tensor:
            divide(model, mesh)
            return model
        own = shard_head(model, mesh, head=model.head) if parallel is Parallel.shard_head else set()
        units = [*model.blocks]
        if not own and not self.config.tied:
            units.append(model.head)  # its loss has a backward of its own
        for unit in units:
            fully_shard(unit, mesh=mesh)
        fully_shard(model, mesh=mesh, ignored_params=own)
        return model

    def batch(self, ids: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """Return this rank's sequences; under tensor parallelism all of them."""
        tokens, targets = super().batch(ids, number)
        if self.config.parallel is Parallel.tensor:
            return tokens, targets
        ranks, rank = dist.get_world_size(), dist.get_rank()
        return tokens.chunk(ranks)[rank], targets.chunk(ranks)[rank]

    def clip_gradients(self) -> None:
        groups = [group["params"] for group in self.optimizer.param_groups]
        norms = [torch.nn.utils.get_total_norm([each.grad for each in group]) for group in groups]
        total = torch.stack([each.full_tensor() if is_dtensor(each) else each for each in norms]).norm()
        for group in groups:
            torch.nn.utils.clip_grads_with_norm_(group, 1.0, total)

    def mean(self, loss: Tensor) -> float:
        """Return the mean of the ranks' losses, whose numbers of tokens are equal."""
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()

    def state(self) -> dict[str, Any]:
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optimizer = get_state_dict(self.model, self.optimizer, options=whole)
        return {"model": model, "optimizer": optimizer}

    def load_state(self, saved: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=saved["model"],
            optim_state_dict=saved["optimizer"],
            options=StateDictOptions(full_state_dict=True),
        )


def divide(model: GPT, mesh: DeviceMesh) -> None:
    """Divide the features of each MLP and the classes of the head; other layers are replicated."""
    for block in model.blocks:
        parallelize_module(block.mlp, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    # The loss takes the weight alone; the sample takes logits, whole ones.
    parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})
