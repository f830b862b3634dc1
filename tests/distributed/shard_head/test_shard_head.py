"""A head divided by classes over data-parallel ranks: one process's gradients, FSDP2 parameters."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import lowtide
from lowtide.ops.linear_cross_entropy import data_sharded
from tests.support.cards import DEVICES
from tests.support.extended import all_extended_but, asked
from tests.support.ranks import needs_gloo, run_ranks

pytestmark = needs_gloo

EXACT = [
    *("normalizer", "mean", "sum", "none", "log-probs", "module", "options", "options, none", "scale"),
    *("bias, options, scale", "ignored", "mean, ignored", "mean, options", "accumulated", "frozen"),
    *("deferred", "deferred, bias", "deferred, chunks"),
]
COMPILED = ["compiled, options", "compiled, none"]
MIXED = ["mixed", "none, mixed", "deferred, mixed"]
SAME = ["as fsdp", "checkpointed", "assigned"]
HELD = [
    "known",
    "padded and refused",
    "wrong on one rank",
    "not a member",
    "deferred by chunks",
    "z-loss",
    "positions",
    "orders of backward",
    "distillation",
    "distillation refused",
]
SLOW = ("distillation", "orders of backward")


@pytest.fixture(scope="module", params=DEVICES)
def results(request, tmp_path_factory):
    """Of all scenarios, by rank."""
    kinds = [
        *asked(request, "kind", [*EXACT, *COMPILED, *MIXED, *SAME, *HELD]),
        "fsdp, mixed",
        "scaled apart",
    ]
    store = tmp_path_factory.mktemp("ranks") / "store"
    return run_ranks("tests.distributed.shard_head.shard_head_ranks", store, kinds, device=request.param)


@pytest.mark.parametrize("kind", [*EXACT, *COMPILED])
def test_exact(results, kind):
    """Averaged as by FSDP2, for ranks of 11 and 4 tokens and shards of 19 and 18 classes."""
    for rank in results:
        assert "raised" not in rank[kind], rank[kind]
        assert all(each <= 1e-14 for each in rank[kind]["errors"].values())
        assert rank[kind]["loss"] <= 1e-14


@pytest.mark.parametrize("kind", EXACT)
def test_head_never_gathered(results, kind):
    for rank in results:
        assert rank[kind]["gathers"] == rank[kind]["reductions"] == 0


@pytest.mark.parametrize("kind", MIXED)
def test_mixed_precision(results, kind):
    """A float32 head beside bfloat16 hidden states: as near as FSDP2's own policy."""
    for rank in results:
        allowed = max(rank["fsdp, mixed"]["errors"].values())
        assert all(each <= 2 * allowed for each in rank[kind]["errors"].values())


@pytest.mark.parametrize("kind", SAME)
def test_parameters_are_those_of_fsdp(results, kind):
    """Optimizer, clipping, state dicts, checkpoints: training.py says how."""
    for rank in results:
        assert "raised" not in rank[kind], rank[kind]["raised"]


@pytest.mark.parametrize("kind", all_extended_but([each for each in HELD if each not in SLOW], HELD))
def test_holds(results, kind):
    """Each rank ran a scenario of calls.py, upstream.py or distillations.py, which asserts."""
    for rank in results:
        assert "raised" not in rank[kind], rank[kind]["raised"]


def test_losses_scaled_apart(results):
    """On CUDA all gradients are NaN, and a later call says why."""
    for rank in results:
        assert "raised" not in rank["scaled apart"], rank["scaled apart"]["raised"]
        said = rank["scaled apart"]["said"]
        later = "the factor by which a loss of lowtide.shard_head is scaled must be the same on all ranks"
        assert "must be scaled by the same factor on all ranks" in said or later in said


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class Model(nn.Module):
    def __init__(self, *, tied=False):
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def test_found_and_kept(mesh):
    """The head is found; it is a linear layer still, and so is a copy, which is divided as well."""
    model = Model()
    before = model.head.weight.detach().clone()
    assert lowtide.shard_head(model, mesh) == {model.head.weight}
    assert isinstance(model.head, nn.Linear)
    assert torch.equal(model.head.weight.full_tensor(), before)
    hidden, target = torch.randn(3, 4), torch.arange(3)
    loss = lowtide.linear_cross_entropy(hidden, copy.deepcopy(model).head.weight, target)
    torch.testing.assert_close(loss, nn.functional.cross_entropy(hidden @ before.T, target))
    torch.testing.assert_close(model.head(hidden), hidden @ before.T)


def test_numbers_of_a_new_group(tmp_path, monkeypatch):
    """A group that has the name of a destroyed one counts its own losses alone."""
    numbers = []

    def noted(name, number, gradient):
        numbers.append((name, number))
        return gradient

    monkeypatch.setattr(data_sharded, "agree_on_gradient", noted)
    for turn in range(2):
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/{turn}", rank=0, world_size=1)
        try:
            model = Model()
            lowtide.shard_head(model, init_device_mesh("cpu", (1,)))
            loss = lowtide.linear_cross_entropy(torch.randn(3, 4), model.head.weight, torch.arange(3))
            loss.backward()
        finally:
            dist.destroy_process_group()
    assert numbers[0] == numbers[1]


def test_refused(mesh):
    with pytest.raises(ValueError, match=r"also that of embed \(Embedding\).*untie the two"):
        lowtide.shard_head(Model(tied=True), mesh)
    model = Model()
    with pytest.raises(TypeError, match=re.escape("model must be a torch.nn.Module")):
        lowtide.shard_head(model.head.weight, mesh)
    with pytest.raises(
        TypeError, match=re.escape("mesh must be a torch.distributed.device_mesh.DeviceMesh, got int")
    ):
        lowtide.shard_head(model, 2)
    with pytest.raises(ValueError, match="mesh must have one dimension"):
        lowtide.shard_head(model, init_device_mesh("cpu", (1, 1)))
    with pytest.raises(TypeError, match=re.escape("head must be a torch.nn.Linear, got Embedding")):
        lowtide.shard_head(model, mesh, head=model.embed)
    lowtide.shard_head(model, mesh)
    with pytest.raises(TypeError, match=re.escape("head must be a torch.nn.Linear, got ShardedLinear")):
        lowtide.shard_head(model, mesh)
    hidden = torch.randn(3, 4)
    with pytest.raises(ValueError, match="linear_bias must be that of the same head"):
        lowtide.linear_cross_entropy(hidden, model.head.weight, torch.arange(3), linear_bias=torch.ones(7))
    with pytest.raises(ValueError, match="shard_head"):
        lowtide.chunked_loss(nn.CrossEntropyLoss(reduction="sum"), model.head, hidden, torch.arange(3))
