"""What test_distributed.py runs as two processes: each scenario is trained by two ranks, deferred, and by
each alone on all of the data, not deferred. Prints, as JSON by scenario, the largest difference of gradients,
or the error."""

import json
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import lowtide
from tests.deferred.helpers import GPT, B, T, V


def build(kind):
    torch.manual_seed(0)
    model = GPT(tied="tied" in kind).double()
    if "unused" in kind:
        model.unused = nn.Linear(2, 2).double()
    return model


def parallel(kind, model):
    if kind.startswith("ddp"):
        return DistributedDataParallel(model, find_unused_parameters="unused" in kind)
    if "head" in kind:
        fully_shard(model.lm_head, reshard_after_forward="reshard" in kind)
    return fully_shard(model)


def step(kind, model, tokens, targets):
    if "outside" in kind:
        logits, _ = model(tokens)
        loss = F.cross_entropy(logits.view(-1, V), targets.view(-1))
        logits.argmax(-1)
    else:
        _, loss = model(tokens, targets)
    loss.backward()


def run(kind, rank):
    generator = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(V, (2, 2, B, T), generator=generator)
    inner, whole = build(kind), build(kind)
    before = lowtide.defer_logits(inner) if "before" in kind else None
    model = parallel(kind, inner)
    deferral = before or lowtide.defer_logits(model)
    for _ in range(2):  # gradients accumulate
        step(kind, model, tokens[rank], targets[rank])
        step(kind, whole, tokens.flatten(0, 1), targets.flatten(0, 1))
    expected = {name: each.grad for name, each in whole.named_parameters() if each.grad is not None}
    error = 0.0
    for name, parameter in inner.named_parameters():
        if name in expected:
            found = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            error = max(error, (found - expected[name]).abs().max().item())
    counts = {"fused": deferral.fused, "materialized": deferral.materialized}
    deferral.undo()
    assert isinstance(model(tokens[rank])[0], torch.Tensor)
    return {"error": error, **counts}


def main(store, world_size, rank, kinds):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=store, world_size=world_size, rank=rank, timeout=timedelta(seconds=60)
    )
    results = {}
    for kind in kinds:
        try:
            results[kind] = run(kind, rank)
        except RuntimeError as error:
            results[kind] = {"raised": str(error)}
    if rank == 0:
        print(json.dumps(results), flush=True)
    dist.barrier()
    if any("raised" in result for result in results.values()):
        os._exit(0)  # an error between FSDP's hooks leaves threads behind, which ending orderly trips over
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], 2, int(sys.argv[2]), sys.argv[3:])
