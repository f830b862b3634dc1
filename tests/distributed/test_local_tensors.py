"""Each rank takes its part of a call with DTensors; results and gradients are placed as promised.

torch's local-tensor mode holds the tensors of all ranks in one process, so every rank is looked at.

Shapes: B sequences, S tokens, D features, V classes.
"""

import importlib.util
from itertools import product

import pytest
import torch
import torch.distributed as dist

from lowtide.ops.linear_cross_entropy.ranks.agreement import check_layout
from lowtide.ops.linear_cross_entropy.sharding import TENSORS, Division, sharded_call

# torch's own names, which a build or a version may leave out.
MODE, FAKE = "torch.distributed._local_tensor", "torch.testing._internal.distributed.fake_pg"
NAMES = ("LocalTensorMode", "LocalTensor", "LocalIntNode")


def mode_of_torch():
    """torch's module, or None where it is not or has other names."""
    if not dist.is_available() or not all(map(importlib.util.find_spec, (MODE, FAKE))):
        return None
    module = importlib.import_module(MODE)
    return module if all(hasattr(module, name) for name in NAMES) else None


local = mode_of_torch()
pytestmark = pytest.mark.skipif(local is None, reason=f"needs {MODE} and {FAKE}")

B, S, D = 4, 6, 5


@pytest.fixture
def ranks(request):
    """All ranks of a fake process group, in local-tensor mode."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    with local.LocalTensorMode(request.param):
        yield range(request.param)
    dist.destroy_process_group()


def mesh_of(*sizes):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", sizes)


def of_rank(value, rank):
    """A tensor or a number of one rank."""
    if isinstance(value, local.LocalTensor):
        return value._local_tensors[rank]
    node = getattr(value, "node", None)
    return node._local_ints[rank] if isinstance(node, local.LocalIntNode) else value


def placed(tensor, mesh, *placements):
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, mesh, placements).requires_grad_(tensor.is_floating_point())


def whole_tensors(V):
    torch.manual_seed(V)
    tensors = {
        "input": torch.randn(B, S, D),
        "linear_weight": torch.randn(V, D),
        "target": torch.randint(V, (B, S)),
        "linear_bias": torch.randn(V),
        "weight": torch.rand(V),
        "row_weight": torch.rand(B, S),
    }
    return {name: of_rank(each, 0).clone() for name, each in tensors.items()}  # the mode makes its own


BY_CLASS, BY_ROW = ("linear_weight", "linear_bias", "weight"), ("input", "target", "row_weight")


def check(ranks, mesh, place, V, rows):
    """The classes are divided over one dimension of the mesh; rows [B, S] too, or not at all."""
    from torch.distributed.tensor import Replicate, Shard

    tensors = whole_tensors(V)

    def on_mesh(placement):
        return [placement if each == place else Replicate() for each in range(mesh.ndim)]

    given = {name: placed(tensors[name], mesh, *on_mesh(Shard(0))) for name in BY_CLASS}
    given |= {name: placed(tensors[name], mesh, *on_mesh(rows)) for name in BY_ROW}
    call = sharded_call(dict.fromkeys(TENSORS) | given, Division())
    assert call.shard.ranks == mesh.size(place)
    assert call.shard.tokens_sharded == isinstance(rows, Shard)
    size, divided = -(-V // mesh.size(place)), getattr(rows, "dim", 0)
    layouts = {}
    for rank in ranks:
        coordinate = of_rank(mesh.get_coordinate()[place], rank)
        first = min(coordinate * size, V)
        assert of_rank(call.shard.first_class, rank) == first
        layouts[coordinate] = (first, of_rank(call.tensors["linear_weight"], rank).shape[0])
        for name in BY_CLASS:
            assert torch.equal(of_rank(call.tensors[name], rank), tensors[name][first : first + size])
        for name in BY_ROW:
            own = tensors[name]
            if call.shard.tokens_sharded:
                own = own.transpose(0, divided)
                step = -(-own.shape[0] // call.shard.ranks)
                own = own[coordinate * step : (coordinate + 1) * step].transpose(0, divided)
            assert torch.equal(of_rank(call.tensors[name], rank), own)
    check_layout([layouts[each] for each in range(len(layouts))], call.shard)

    # Results: a number on all ranks, or one for each row, placed as the rows are.
    loss = call.tensors["row_weight"] * 3
    by_row, total = call.returned(loss, by_row=True), call.returned(loss.sum(), by_row=False)
    assert tuple(by_row.placements) == tuple(on_mesh(rows))
    assert tuple(total.placements) == tuple(on_mesh(Replicate()))
    assert torch.equal(of_rank(by_row.full_tensor(), 0), 3 * tensors["row_weight"])

    # Gradients arrive summed over the ranks, and are placed as the tensors are: nothing reduces
    # them again. A leaf copies those whose strides are not its own; torch 2.11 replicates such a
    # copy of uneven shards.
    for name in ("input", "linear_weight", "linear_bias", "row_weight"):
        own, leaf = call.tensors[name], given[name]
        (gradient,) = torch.autograd.grad(own, leaf, torch.ones_like(own), retain_graph=True)
        own.backward(torch.ones_like(own))
        assert tuple(gradient.placements) == tuple(leaf.placements), name
        copied = gradient.new_empty_strided(leaf.shape, leaf.stride())
        kept = gradient if gradient.stride() == leaf.stride() else copied
        assert tuple(leaf.grad.placements) == tuple(kept.placements), name
        assert torch.equal(of_rank(leaf.grad.full_tensor(), 0), torch.ones_like(tensors[name])), name


@pytest.mark.parametrize("ranks", [4], indirect=True)
@pytest.mark.parametrize("V", [12, 10, 5, 1])
def test_one_dimension(ranks, V):
    """Shards of as many classes, of fewer on the last rank, and of none."""
    from torch.distributed.tensor import Replicate, Shard

    for rows in (Replicate(), Shard(0), Shard(1)):
        check(ranks, mesh_of(4), 0, V, rows)


@pytest.mark.parametrize("ranks", [6], indirect=True)
def test_two_dimensions(ranks):
    """Classes over either dimension; those of the other have the same."""
    from torch.distributed.tensor import Replicate, Shard

    for place, rows in product((0, 1), (Replicate(), Shard(0), Shard(1))):
        check(ranks, mesh_of(2, 3), place, 7, rows)


@pytest.mark.parametrize("ranks", [4], indirect=True)
def test_refused_placements(ranks):
    """The same sentence on all ranks."""
    from torch.distributed.tensor import Replicate, Shard

    tensors, mesh = whole_tensors(8), mesh_of(4)

    def call(weight, input=None):
        given = {"input": placed(tensors["input"], mesh, input or Replicate()), "target": tensors["target"]}
        given["linear_weight"] = placed(tensors["linear_weight"], mesh, weight)
        return sharded_call(dict.fromkeys(TENSORS) | given, Division())

    for weight in (Replicate(), Shard(1)):
        with pytest.raises(ValueError, match="linear_weight must be divided by classes over one dimension"):
            call(weight)
    with pytest.raises(ValueError, match="input must be replicated on linear_weight's mesh, or divided"):
        call(Shard(0), Shard(2))


@pytest.mark.parametrize("ranks", [4], indirect=True)
@pytest.mark.parametrize("V", [12, 10, 5])
def test_shard_head(ranks, V):
    """Each rank's part is that of distribute_tensor, which FSDP2's is; own_classes tells it."""
    from torch.distributed.tensor import Shard

    import lowtide
    from lowtide.ops.linear_cross_entropy.data_sharded import own_classes

    mesh, head = mesh_of(4), torch.nn.Linear(D, V)
    whole = {name: of_rank(each.detach(), 0).clone() for name, each in head.named_parameters()}
    lowtide.shard_head(head, mesh, head=head)
    for name, parameter in head.named_parameters():
        theirs = placed(whole[name], mesh, Shard(0)).to_local()
        classes = own_classes(parameter)
        for rank in ranks:
            own = of_rank(parameter.to_local(), rank)
            assert torch.equal(own, of_rank(theirs, rank))
            assert torch.equal(own, whole[name][of_rank(classes.start, rank) : of_rank(classes.stop, rank)])
