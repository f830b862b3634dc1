"""Scenarios of backward: losses scaled apart, and in other orders on one rank."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import lowtide
from lowtide.ops.linear_cross_entropy import data_sharded
from tests.distributed.shard_head.models import ROWS, D, V, build, divided_head, refused
from tests.support.rank_errors import raised_in_backward
from tests.support.ranks import DEVICE, RANKS


def scaled_apart(kind, rank, mesh):
    model = build(kind, torch.float64)
    lowtide.shard_head(model, mesh, head=model.head)
    x = torch.randn(3, D, dtype=torch.float64, requires_grad=True)

    def loss():
        return lowtide.linear_cross_entropy(x, model.head.weight, torch.tensor([3, 5, 7]))

    return {"said": raised_in_backward((loss() * (rank + 1)).backward, [x, model.head.weight], loss)}


def orders_of_backward(kind, rank, mesh):
    """Twice with the graph retained; two losses in one sum; other losses, or none, on one rank:
    gradients of all ranks' tokens, or an error on both.
    """
    head, alone, (x, y), (every_x, every_y) = divided_head("orders", rank, mesh)
    x, every_x = x.detach().requires_grad_(), every_x.detach().requires_grad_()

    def loss(targets=y, **options):
        return lowtide.linear_cross_entropy(x, head.weight, targets, **options)

    def gradients(*losses):
        for each in (x, head.weight):
            each.grad = None
        for each, options in losses:
            each.backward(**options)
        return x.grad.clone(), head.weight.grad.full_tensor()

    expected = F.cross_entropy(alone(every_x), every_y)
    dx, dw = torch.autograd.grad(expected, (every_x, alone.weight))
    own = dx.split(ROWS)[rank]  # the gradient of this rank's own loss; the mean over ranks is taken later

    one = loss()
    twice = gradients((one, {"retain_graph": True}), (one, {}))
    both = gradients((loss() + loss(), {}))
    first, second = loss(), loss()
    apart = gradients((second, {}), (first, {}))
    for found in (twice, both, apart):
        torch.testing.assert_close(found[0], 2 * RANKS * own)
        torch.testing.assert_close(found[1], 2 * dw)

    # Ranks take the two losses in different orders; their targets or scales may differ.
    for reduction in ("mean", "sum"):
        losses = loss(reduction=reduction), loss((y + 1) % V, reduction=reduction)
        for each in losses if rank else reversed(losses):
            said = raised_in_backward(each.backward, [x, head.weight])
            assert "the call that backward belongs to must be the same on all ranks" in said
    one, other = loss(), loss()
    if rank:  # leaves out its loss, and goes on
        refused("operator must be the same on all ranks", loss)
    else:
        said = raised_in_backward(one.backward, [x, head.weight])
        assert "operator must be the same on all ranks" in said
    other.backward()  # the ranks are together again

    # A rank that leaves out its loss and never comes back: the others raise when their group's time
    # is over.
    if DEVICE == "cuda":
        return {}  # there the work that waits is the card's, and NCCL ends the process
    short = dist.new_group(timeout=timedelta(seconds=2))
    left_out = data_sharded._MeanOfLosses.apply(x.sum(), short)
    if rank == 0:
        with pytest.raises(RuntimeError, match="waited for the others in backward of a loss"):
            left_out.backward()
    dist.barrier()
    return {}
