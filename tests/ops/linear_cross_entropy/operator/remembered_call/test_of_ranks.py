"""A call of a head that is divided over ranks, or that FSDP2 shards, goes straight to an engine
only after one that is divided alike.

One rank alone, whose parts are whole. Shapes: D features, V classes.
"""

import copy
import gc

import pytest
import torch
import torch.distributed as dist

import lowtide
from lowtide.ops.linear_cross_entropy.operator import signatures
from tests.ops.linear_cross_entropy.operator.remembered_call.helpers import D, V, check, exact, tensors
from tests.support.ranks import needs_gloo

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    needs_gloo,
]


@pytest.fixture
def new_mesh(device, tmp_path):
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield lambda: init_device_mesh(device, (1,))
    dist.destroy_process_group()


def on_mesh(tensor, mesh, placement):
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.detach(), mesh, [placement]).requires_grad_(tensor.requires_grad)


def ways(new_mesh, x, w, target):
    """The arguments and options of divided calls, by name; the tensors are alike otherwise."""
    from torch.distributed.tensor import Replicate, Shard

    mesh, group = new_mesh(), dist.group.WORLD
    divided = on_mesh(w, mesh, Shard(0))
    shards = torch.nn.Linear(D, V, bias=False, device=x.device)
    shards.weight.data.copy_(w)
    lowtide.shard_head(shards, new_mesh(), head=shards)
    return {
        "group": ((x, w, target), {"group": group}),
        "first class": ((x, w, target), {"group": group, "first_class": 0, "num_classes": V}),
        "tokens": ((x, w, target), {"group": group, "tokens_sharded": True}),
        "segments": ((x, w, target), {"segments": 4}),
        "weight": ((x, divided, target), {}),
        "all": (
            (on_mesh(x, mesh, Replicate()), divided, on_mesh(target, mesh, Replicate())),
            {},
        ),
        "shard_head": ((x, shards.weight, target), {}),
    }


def test_straight_after_a_call_divided_alike(device, new_mesh, went):
    """A plain call of the same shapes is remembered apart, and so is each way to divide one."""
    x, w, target = tensors(device)
    check(x, w, target)
    expected, _ = exact(x, w, target)
    for name, (given, options) in ways(new_mesh, x, w, target).items():
        signatures._calls.clear()
        check(x, w, target)
        went.clear()
        for _ in range(3):
            loss = lowtide.linear_cross_entropy(*given, backend="triton", **options)
            loss.backward()
            loss = loss.to_local() if hasattr(loss, "to_local") else loss
            torch.testing.assert_close(loss.detach().cpu().double(), expected, rtol=1e-5, atol=1e-6)
        assert went == ["operator", "straight", "straight"], name
    went.clear()
    check(x, w, target)
    assert went == ["straight", "straight"]


def test_checks_of_fsdp_stay(device, new_mesh, went):
    """A gathered parameter whose gradient nobody reduces is refused, even if remembered."""
    from torch.distributed.fsdp import fully_shard

    x, w, target = tensors(device)
    check(x, w, target)
    head = torch.nn.Linear(D, V, bias=False, device=device)
    alone = copy.deepcopy(head)
    fully_shard(head, mesh=new_mesh())
    with pytest.raises(ValueError, match="must be the parameter itself"):
        lowtide.linear_cross_entropy(x, head.weight.full_tensor(), target, backend="triton")
    for weight in (head.weight, alone.weight):
        lowtide.linear_cross_entropy(x, weight, target, backend="triton").backward()
    torch.testing.assert_close(head.weight.grad.full_tensor(), alone.weight.grad)


def test_weight_divided_after_a_unit_is_gone(device, new_mesh):
    """The weight is not taken for one of a unit that only waits for its collection."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    mesh, (x, w, target) = new_mesh(), tensors(device)
    divided = on_mesh(w, mesh, Shard(0))
    gc.collect()
    gc.disable()
    try:
        unit = fully_shard(torch.nn.Linear(D, V, bias=False, device=x.device), mesh=mesh)
        unit.itself = [unit]
        with pytest.raises(ValueError, match="the parameter that FSDP2 shards"):
            lowtide.linear_cross_entropy(x, divided, target)
        del unit
        lowtide.linear_cross_entropy(x, divided, target)
    finally:
        gc.enable()
