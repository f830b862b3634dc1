"""Scenarios of a backward that differs among the ranks: what raises on one, and results that have
no gradient there.

Shapes: N tokens, D features, V classes of all ranks.
"""

from datetime import timedelta
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import lowtide
from tests.ops.linear_cross_entropy.ranks.place import N, Place, close, made
from tests.ops.linear_cross_entropy.ranks.vocab_parallel_ranks import room
from tests.support.rank_errors import raised
from tests.support.ranks import DEVICE


def errors_of_backward() -> None:
    """What raises on the last rank alone, before the ranks agree, is told to those waiting."""
    place, inputs = Place(), made()
    w, last = inputs.linear_weight.detach()[place.classes], place.ranks - 1

    def begun(reduction: str, part: slice, **given: Any) -> tuple[Tensor, Tensor]:
        x = place.leaf(inputs.input, part) * 1
        call = (x, w, inputs.target[part])
        if reduction == "log-probs":
            return x, lowtide.linear_log_probs(*call, group=place.group, **given).log_prob.sum()
        given["reduction"] = reduction
        return x, lowtide.linear_cross_entropy(*call, group=place.group, **given).sum()

    everywhere = ((slice(None), {}), (place.tokens, {"tokens_sharded": True}))
    for reduction, (part, given) in product(("none", "log-probs"), everywhere):
        x, loss = begun(reduction, part, **given)
        if place.rank == last:
            x.data.zero_()
            x.mul_(2)
        message = raised(loss.backward)
        assert "modified by an inplace operation" in message
        assert (f"rank {last} of the group raised an error" in message) == (place.rank != last)
        x, loss = begun(reduction, part, **given)
        message = raised(partial(torch.autograd.grad, loss, x, create_graph=place.rank == last))
        assert "no create_graph=True" in message
        close(begun(reduction, part, **given)[1].detach(), loss.detach())
    x, loss = begun("mean", slice(None))  # whose backward has no collective, so nobody is told
    message = raised(partial(torch.autograd.grad, loss, x, create_graph=place.rank == last))
    assert ("no create_graph=True" in message) == (place.rank == last)


class _WithoutGradient(torch.autograd.Function):
    """Its backward gives no gradient, as of a result that is not used."""

    @staticmethod
    def forward(ctx: Any, each: Tensor) -> Tensor:
        return each.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:  # type: ignore[override]
        return None


def results_without_gradient() -> None:
    """What has no upstream gradient on the last rank, or is not differentiated there at all."""
    place, inputs = Place(), made(ignored=0.0)
    rank, last, group = place.rank, place.ranks - 1, place.group
    w, names = inputs.linear_weight.detach()[place.classes], ("log_prob", "entropy", "logsumexp")

    def begun(reduction: str, part: slice, **given: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        x, own = place.leaf(inputs.input, part), place.leaf(w)
        call = (x, own, inputs.target[part])
        if reduction == "log-probs":
            return x, own, lowtide.linear_log_probs(*call, group=group, **given)._asdict()
        given["reduction"] = reduction
        return x, own, {"loss": lowtide.linear_cross_entropy(*call, group=group, **given)}

    def truth(use: Any) -> Any:
        """Gradients of all ranks' losses, where `use` says which results a rank uses."""
        x, w = place.leaf(inputs.input), place.leaf(inputs.linear_weight)
        logits = x @ w.T
        logp = logits.log_softmax(1)
        found = {
            "log_prob": logp.gather(1, inputs.target[:, None])[:, 0],
            "entropy": -(logp.exp() * logp).sum(1),
            "logsumexp": logits.logsumexp(1),
        }
        found["loss"] = -found["log_prob"]
        parts = [slice(each * N // place.ranks, (each + 1) * N // place.ranks) for each in range(last + 1)]
        used = [found[name][part] for each, part in enumerate(parts) for name in use(each)]
        return torch.autograd.grad(sum(each.square().sum() for each in used), (x, w))

    # Ranks with tokens of their own may use other results, or none.
    uses = {
        "one each": lambda each: [names[each % 3]],
        "more on the last": lambda each: names if each == last else ["log_prob"],
        "none on the last": lambda each: [] if each == last else ["entropy", "log_prob"],
        "loss": lambda each: [] if each == last else ["loss"],
    }
    for name, use in uses.items():
        kind = "none" if name == "loss" else "log-probs"
        x, own, found = begun(kind, place.tokens, tokens_sharded=True, workspace=room(30_000))
        total = sum(found[each].square().sum() for each in use(rank))
        if not use(rank):
            total = _WithoutGradient.apply(found["loss" if name == "loss" else "entropy"])
        total.backward()
        wanted = truth(use)
        close(x.grad, wanted[0][place.tokens])
        close(own.grad, wanted[1][place.classes])

    # Replicated tokens: ranks with other upstream gradients would have other gradients of one
    # input.
    _, _, found = begun("log-probs", slice(None))
    total = found["log_prob"].sum() if rank != last else _WithoutGradient.apply(found["log_prob"])
    assert "upstream gradients of log_prob" in raised(total.backward)
    _, _, found = begun("none", slice(None))
    total = found["loss"].sum() if rank != last else _WithoutGradient.apply(found["loss"])
    assert "upstream gradients of loss" in raised(total.backward)

    # Two calls of one shape, of which each rank uses another; a rank without backward that calls
    # again.
    for kind, (part, given) in product(
        ("none", "log-probs"), ((slice(None), {}), (place.tokens, {"tokens_sharded": True}))
    ):
        results = [next(iter(begun(kind, part, **given)[2].values())).sum() for _ in range(2)]
        message = raised(results[rank == last].backward)
        assert "the call that backward belongs to must be the same" in message, message
        assert "its loss must use the results of each" in message
        result = next(iter(begun(kind, part, **given)[2].values())).sum()
        message = raised(partial(begun, kind, part, **given) if rank == last else result.backward)
        assert "operator must be the same" in message, message
        assert "its loss must use the results of each" in message

    # A rank that never calls again: the others raise when their group's time is over.
    if DEVICE == "cuda":
        return  # NCCL ends their processes then
    short = dist.new_group(timeout=timedelta(seconds=2))
    result = lowtide.linear_log_probs(place.leaf(inputs.input), w, inputs.target, group=short)
    if rank != last:
        message = raised(result.log_prob.sum().backward)
        assert "waited for the others in linear_log_probs_backward" in message, message
        assert "if only times 0" in message
    dist.barrier()
