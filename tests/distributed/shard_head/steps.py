"""A step of a model whose head is divided, beside one process that has all of the data."""

import contextlib
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F

import lowtide
from tests.distributed.shard_head.models import CLASS_WEIGHT, ROWS, D, V, build, data, sharded
from tests.support.collectives import Collectives
from tests.support.ranks import RANKS, largest_errors


def loss_of(kind, model, x, y, normalizer, weights):
    """The loss of some rows by lowtide, over a normaliser or the mean's own."""
    hidden, head = model(x), model.head
    options = {"linear_bias": head.bias}
    if model.scale is not None:
        options["logit_scale"] = model.scale.reshape(())
    if "log-probs" in kind:
        out = lowtide.linear_log_probs(hidden, head.weight, y, **options)
        return -(out.log_prob * weights + 0.1 * out.entropy).sum() / normalizer
    if "module" in kind:
        return model.criterion(hidden, y, normalizer=normalizer)
    if "deferred" in kind:
        logits = head(hidden)
        total = F.cross_entropy(logits, y, reduction="sum") / normalizer
        return total + 0.1 * logits.logsumexp(-1).sum() / normalizer if "chunks" in kind else total
    if "options" in kind:
        options |= {
            "weight": CLASS_WEIGHT.to(x.dtype),
            "label_smoothing": 0.1,
            "z_loss": 0.01,
            "softcap": 5.0,
        }
        options["row_weight"] = weights
    if "none" in kind:
        loss = lowtide.linear_cross_entropy(hidden, head.weight, y, reduction="none", **options)
        return (loss * weights).sum() / normalizer
    if "sum" in kind:
        return lowtide.linear_cross_entropy(hidden, head.weight, y, reduction="sum", **options) / normalizer
    options["normalizer"] = None if "mean" in kind else normalizer
    return lowtide.linear_cross_entropy(hidden, head.weight, y, **options)


@contextlib.contextmanager
def understood():
    """Raise where torch.compile warns of code that it cannot trace. (A mode would not compile.)"""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Dynamo does not know how to trace")
        yield


def one_step(kind, rank, mesh):
    dtype = torch.float32 if "mixed" in kind else torch.float64
    x, y, weights = data(kind, dtype)
    inner, alone = build(kind, dtype), build(kind, dtype)
    model = sharded(kind, inner, mesh)
    deferral = lowtide.defer_logits(model, head=inner.head) if "deferred" in kind else None
    xs, ys, ws = (each.split(ROWS)[rank] for each in (x, y, weights))
    class_weight = CLASS_WEIGHT.to(dtype) if "options" in kind else None
    normalizer = lowtide.tokens_per_rank(ys, weight=class_weight).to(dtype)
    collectives, steps = Collectives(V * D), 3 if "accumulated" in kind else 1
    compiled = torch.compile(loss_of, backend="aot_eager") if "compiled" in kind else loss_of
    with understood() if "compiled" in kind else collectives:
        for step in range(steps):
            model.set_requires_gradient_sync(step == steps - 1)
            loss = compiled(kind, inner if "fsdp" not in kind else model, xs, ys, normalizer, ws)
            loss.backward()
    count = normalizer * RANKS
    for _ in range(steps):
        truth = loss_of(kind.replace("deferred", "eager, deferred"), alone, x, y, count, weights)
        truth.backward()
    errors = largest_errors(model, alone)
    value = loss.detach().clone()
    dist.all_reduce(value)
    fused = {} if deferral is None else {"fused": deferral.fused, "materialized": deferral.materialized}
    error = abs((value / RANKS - truth.detach()).item())
    return {"errors": errors, "loss": error, **collectives.counts, **fused}
