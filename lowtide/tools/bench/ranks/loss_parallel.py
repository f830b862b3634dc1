"""Define the loss of torch's own loss_parallel, whose logits are divided over the ranks by classes.

Legend: N tokens, D features, V classes of all ranks, of which V_r are this one's.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from lowtide.tools.bench.cases import LossCase
from lowtide.tools.eager import eager_loss


def loss_parallel_of(case: LossCase) -> Any:
    """Return the loss of (input_ND, this rank's weight_VD, target_N), as torch's users write it."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(case.device, (case.ranks,))
    return partial(_LossParallel.apply, mesh, case.classes, case.softcap)


class _LossParallel(torch.autograd.Function):
    """Run forward and backward inside loss_parallel(), which both need."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, mesh: Any, classes: int, softcap: float | None, *inputs: Tensor
    ) -> Tensor:
        from torch.distributed.tensor import DTensor, Replicate, Shard
        from torch.distributed.tensor.parallel import loss_parallel

        input_ND, weight_VD, target_N = inputs
        wanted = ctx.needs_input_grad[3:5]
        with torch.set_grad_enabled(any(wanted)), loss_parallel():
            leaves = [each.detach().requires_grad_(grad) for each, grad in zip((input_ND, weight_VD), wanted)]
            whole = {"shape": torch.Size((classes, weight_VD.shape[1])), "stride": weight_VD.stride()}
            loss: Any = eager_loss(
                DTensor.from_local(leaves[0], mesh, [Replicate()], run_check=False),
                DTensor.from_local(leaves[1], mesh, [Shard(0)], run_check=False, **whole),
                DTensor.from_local(target_N, mesh, [Replicate()], run_check=False),
                softcap=softcap,
            )
            own: Tensor = loss.to_local()
        ctx.loss, ctx.leaves = own, leaves
        return own.detach()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        from torch.distributed.tensor.parallel import loss_parallel

        with loss_parallel():
            found = torch.autograd.grad(ctx.loss, ctx.leaves, grad_output)
        del ctx.loss, ctx.leaves
        return (None, None, None, *found, None)
