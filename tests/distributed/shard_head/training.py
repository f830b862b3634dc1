"""Scenarios that train a model with a divided head: optimizer, clipping, state dicts and
checkpoints are those of FSDP2 alone.
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor, Shard

import lowtide
from tests.distributed.shard_head.models import D, V, build, sharded
from tests.support.ranks import RANKS, generator, whole


def trained(kind, rank, mesh, steps=3, start=None):
    """(model, optimizer) after steps with clipped gradients."""
    inner = build(kind, torch.float64)
    model = sharded(kind, inner, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=True)
    norms = []
    if start is not None:
        state, of_optimizer = get_state_dict(model, optimizer)
        dcp.load({"model": state, "optimizer": of_optimizer}, checkpoint_id=start)
        set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=of_optimizer)
    for step in range(steps):
        seeded = generator(step)
        x = torch.randn(RANKS, 6, 4, generator=seeded, dtype=torch.float64)[rank]
        y = torch.randint(V, (RANKS, 6), generator=seeded)[rank]
        hidden = model(x)
        loss = lowtide.linear_cross_entropy(hidden, inner.head.weight, y, linear_bias=inner.head.bias)
        optimizer.zero_grad()
        loss.backward()
        norms.append(whole(nn.utils.clip_grad_norm_(model.parameters(), 0.1)).item())
        optimizer.step()
    return model, optimizer, norms


def same(one, other):
    assert one.keys() == other.keys(), (sorted(one), sorted(other))
    for name, each in one.items():
        assert type(each) is type(other[name]), name
        if isinstance(each, DTensor):
            assert each.placements == other[name].placements == (Shard(0),)
            assert each.to_local().shape == other[name].to_local().shape, name
        torch.testing.assert_close(whole(each), whole(other[name]), rtol=1e-10, atol=1e-12, msg=name)


def as_fsdp(kind, rank, mesh):
    """Training, clipping, optimizer state and state dicts are those of FSDP2 alone."""
    model, optimizer, norms = trained("bias", rank, mesh)
    theirs, their_optimizer, their_norms = trained("fsdp, bias", rank, mesh)
    same(model.state_dict(), theirs.state_dict())
    torch.testing.assert_close(norms, their_norms)
    for one, other in zip(optimizer.state.values(), their_optimizer.state.values(), strict=True):
        same(one, other)
    return {}


def checkpointed(kind, rank, mesh):
    """Saved by one, loaded by the other, either way round, and trained on: the same run."""
    box = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(box)
    straight, _, _ = trained("bias", rank, mesh, steps=3)
    for saver, loader in (("bias", "fsdp, bias"), ("fsdp, bias", "bias"), ("bias", "bias")):
        model, optimizer, _ = trained(saver, rank, mesh)
        path = Path(box[0]) / f"{saver} to {loader}"
        state, of_optimizer = get_state_dict(model, optimizer)
        dcp.save({"model": state, "optimizer": of_optimizer}, checkpoint_id=path)
        loaded, _, _ = trained(loader, rank, mesh, steps=0, start=path)
        same(loaded.state_dict(), straight.state_dict())
        after, _, _ = trained(loader, rank, mesh, steps=2, start=path)
        expected, _, _ = trained(saver, rank, mesh, steps=2, start=path)
        same(after.state_dict(), expected.state_dict())
    return {}


def assigned(kind, rank, mesh):
    """A state dict loaded by assignment brings other parameters, which are still known."""
    model, _, _ = trained("bias", rank, mesh, steps=1)
    state = {name: each.clone() for name, each in model.state_dict().items()}
    other = build("bias", torch.float64)
    own = lowtide.shard_head(other, mesh, head=other.head)
    assert own == set(other.head.parameters())
    other.load_state_dict(state, assign=True)
    x = torch.randn(3, D, dtype=torch.float64)
    y = torch.tensor([3, 5, 7])[: 2 + rank]
    loss = lowtide.linear_cross_entropy(x[: 2 + rank], other.head.weight, y, linear_bias=other.head.bias)
    assert loss.isfinite()
    with torch.no_grad():
        logits = other.eval().head(x)
    torch.testing.assert_close(logits, F.linear(x, *(whole(each) for each in other.head.parameters())))
    return {}
