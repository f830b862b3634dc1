"""What test_distributed.py runs as two processes: each scenario is trained by two ranks, deferred,
and by each alone on all of the data, not deferred, in float64. Gradients may differ by as many
roundings as those of the same in float32."""

import contextlib

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import lowtide
from lowtide.deferred.proxies.logits import DeferredLogits
from tests.deferred.helpers import GPT, B, T, V
from tests.ops.chunked_loss.helpers import close, roundings_of
from tests.support.ranks import RANKS, generator, gradients, mesh_of


def build(kind):
    torch.manual_seed(0)
    model = GPT(tied="tied" in kind).double()
    if "unused" in kind:
        model.unused = nn.Linear(2, 2).double()
    return model


def parallel(kind, model):
    if kind.startswith("ddp"):
        model = torch.compile(model, backend="aot_eager") if "of compiled" in kind else model
        model = DistributedDataParallel(model, find_unused_parameters="unused" in kind)
        return torch.compile(model, backend="aot_eager") if kind.endswith("compiled whole") else model
    if kind.startswith("fsdp1"):
        options = {"device_id": torch.get_default_device(), "use_orig_params": True}
        if "head" in kind:
            model.lm_head = FullyShardedDataParallel(model.lm_head, **options)
        return FullyShardedDataParallel(model, **options)
    mesh = mesh_of(RANKS)
    if "head" in kind:
        fully_shard(model.lm_head, mesh=mesh, reshard_after_forward="reshard" in kind)
    policy = MixedPrecisionPolicy(output_dtype=torch.float32) if "cast" in kind else MixedPrecisionPolicy()
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def step(kind, model, tokens, targets):
    if "outside" in kind:
        logits, _ = model(tokens)
        loss = F.cross_entropy(logits.view(-1, V), targets.view(-1))
        assert "cast" not in kind or logits.dtype == torch.float32 or not isinstance(logits, DeferredLogits)
        logits.argmax(-1)
    else:
        _, loss = model(tokens, targets)
    loss.backward()


def run(kind, rank):
    tokens, targets = torch.randint(V, (2, 2, B, T), generator=generator(1))
    inner, whole, narrow = build(kind), build(kind), build(kind).float()
    before = lowtide.defer_logits(inner) if "before" in kind else None
    model = parallel(kind, inner)
    head = inner.lm_head.module if kind == "fsdp1 head" else None
    deferral = before or lowtide.defer_logits(model, head=head)
    for _ in range(2):  # gradients accumulate
        step(kind, model, tokens[rank], targets[rank])
        for alone in (whole, narrow):
            step(kind, alone, tokens.flatten(0, 1), targets.flatten(0, 1))
    expected, eager = gradients(whole), gradients(narrow)
    whole_again = contextlib.nullcontext()
    if kind.startswith("fsdp1"):
        whole_again = FullyShardedDataParallel.summon_full_params(model, with_grads=True)
    with whole_again:
        found = {name: each.clone() for name, each in gradients(inner).items()}
    allowed = roundings_of(list(eager.values()), list(expected.values()))
    dtype = torch.float32 if "cast" in kind else torch.float64
    close([found[name] for name in expected], list(expected.values()), dtype, roundings=allowed)
    counts = {"fused": deferral.fused, "materialized": deferral.materialized}
    deferral.undo()
    assert isinstance(model(tokens[rank])[0], torch.Tensor)
    return counts
