"""Scenarios that measure a step: its collectives and its memory.

Shapes: N tokens, D features, V classes of all ranks.
"""

from typing import Any

import torch

import lowtide
from tests.ops.linear_cross_entropy.ranks.counted_collectives import counted
from tests.ops.linear_cross_entropy.ranks.place import Place, made
from tests.support.ranks import DEVICE


def collectives_of_a_step() -> dict[str, Any]:
    """What forward and backward move, for a call in chunks; the first entry is the agreement."""
    place, found = Place(), {}
    inputs = made(dtype=torch.float32, ignored=0.0)
    for name, options in {
        "mean": {},
        "mean, one chunk": {"workspace": None},
        "none": {"reduction": "none"},
        "smoothing": {"label_smoothing": 0.1},
        "class weights": {"weight": torch.ones(place.V_r)},
        "tokens": {"tokens_sharded": True},
        "frozen input": {"frozen": True},
    }.items():
        tokens = place.tokens if "tokens_sharded" in options else slice(None)
        x, w = place.leaf(inputs.input, tokens), place.leaf(inputs.linear_weight, place.classes)
        x.requires_grad_(not options.pop("frozen", False))
        given = {"workspace": 25_000 if DEVICE == "cpu" else 81_000, **options}
        with counted() as calls:
            loss = lowtide.linear_cross_entropy(x, w, inputs.target[tokens], group=place.group, **given)
            forward = len(calls)
            loss.sum().backward()
        found[name] = {"forward": calls[:forward], "backward": calls[forward:]}
    return found


def peak() -> dict[str, Any]:
    """Peak and largest allocation of a step whose logits would be far larger, on this rank."""
    N, D, V = 512, 16, 8192
    place = Place(V)
    torch.manual_seed(0)
    x, w = torch.randn(N, D), torch.randn(V, D)[place.classes].clone()
    target, workspace = torch.randint(V, (N,)), 1 << 20
    found = {}
    own = slice(place.rank * N // place.ranks, (place.rank + 1) * N // place.ranks)
    for name, tokens in {"replicated": slice(None), "tokens": own}.items():
        leaves = place.leaf(x, tokens), place.leaf(w)
        given = {"group": place.group, "workspace": workspace, "tokens_sharded": name == "tokens"}
        if DEVICE == "cuda":  # before libraries have their room
            lowtide.linear_cross_entropy(*leaves, target[tokens], **given).backward()
            for each in leaves:
                each.grad = None
        with lowtide.peak_memory(DEVICE) as peak:
            loss = lowtide.linear_cross_entropy(*leaves, target[tokens], **given)
            loss.backward()
        gradients = sum(each.grad.nbytes for each in leaves)
        found[name] = {"beyond": peak.bytes - gradients, "largest": peak.largest}
    return {**found, "workspace": workspace, "logits": N * place.V_r * 4}
