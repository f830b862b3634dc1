"""Scenarios of what a divided head returns: at extremes, with ignored rows, and to the bit with
segments.

Shapes: N tokens, D features, V classes of all ranks.
"""

from itertools import product

import torch
import torch.distributed as dist

import lowtide
from tests.ops.linear_cross_entropy.ranks.place import N, Place, V, close, made
from tests.ops.linear_cross_entropy.ranks.vocab_parallel_ranks import room
from tests.support.loss import make_inputs
from tests.support.ranks import DEVICE


def extremes() -> None:
    """Ties, classes excluded by a bias of -inf, NaN, no tokens, and no valid token."""
    place, inputs = Place(), made()
    x, w = inputs.input.detach(), inputs.linear_weight.detach().clone()
    w[:] = w[: place.V_r].repeat(place.ranks, 1)  # the same classes on each rank
    target = inputs.target
    found = lowtide.linear_log_probs(x, w[place.classes], target, group=place.group)
    best = (x @ w[: place.V_r].T).argmax(1).masked_fill(target == -100, -1)
    assert torch.equal(found.argmax, best)

    w = inputs.linear_weight.detach()
    for first, last in ((0, place.V_r), (place.V_r - 1, V - 1)):  # whole shards, too
        bias = torch.zeros(V).double()
        bias[first:last] = -torch.inf
        allowed = torch.full((N,), V - 1)
        own = {"linear_bias": bias[place.classes], "group": place.group}
        found = lowtide.linear_log_probs(x, w[place.classes], allowed, **own)
        expected = lowtide.linear_log_probs(x, w, allowed, linear_bias=bias)
        for each, other in zip(found, expected):
            close(each, other)
        smooth = lowtide.linear_cross_entropy(x, w[place.classes], allowed, **own, label_smoothing=0.1)
        assert smooth == torch.inf

    nan = w.clone()
    nan[0] = torch.nan
    assert lowtide.linear_cross_entropy(x, nan[place.classes], target, group=place.group).isnan()

    for rows, label in ((x[:0], target[:0]), (x, torch.full_like(target, -100))):
        leaves = [place.leaf(rows), place.leaf(w, place.classes)]
        loss = lowtide.linear_cross_entropy(*leaves, label, group=place.group)
        assert loss.isnan()
        loss.backward()
        assert not any(each.grad.any() for each in leaves)


def ignored_rows() -> None:
    """What an ignored row holds, NaN or infinity, reaches no result or gradient, as in one."""
    place, inputs = Place(), made(bias=True, logit_scale=True)
    groups = [dist.new_group([rank]) for rank in range(place.ranks)]
    alone = {"group": groups[place.rank], "first_class": 0, "num_classes": V}
    target = inputs.target.clone()
    target[::3] = -100
    dirty = inputs.input.detach().clone()
    dirty[::6], dirty[3::6] = torch.nan, torch.inf
    every = slice(None)
    for tokens, classes, given in (
        (place.tokens, place.classes, {"group": place.group, "tokens_sharded": True}),
        (every, place.classes, {"group": place.group}),
        (every, every, {**alone, "tokens_sharded": True}),
    ):
        for reduction, workspace in product(("mean", "sum", "none", "log-probs"), (None, room(30_000))):
            results = []
            for x in (inputs.input.detach(), dirty):
                leaves = [place.leaf(x, tokens)]
                leaves += [place.leaf(each, classes) for each in (inputs.linear_weight, inputs.linear_bias)]
                leaves.append(place.leaf(inputs.logit_scale))
                options = {"linear_bias": leaves[2], "logit_scale": leaves[3], "workspace": workspace} | given
                if reduction == "log-probs":
                    found = lowtide.linear_log_probs(*leaves[:2], target[tokens], **options)
                    result = found.log_prob + 0.1 * found.entropy + 0.1 * found.logsumexp
                else:
                    options["reduction"] = reduction
                    result = lowtide.linear_cross_entropy(*leaves[:2], target[tokens], **options)
                results.append([result.detach(), *torch.autograd.grad(result.sum(), leaves)])
            for place_of, (clean, found) in enumerate(zip(*results)):
                assert clean.isfinite().all()
                if DEVICE == "cpu" or place_of == 0:  # on CUDA it may reach gradients, as is documented
                    close(found, clean)


def segments() -> None:
    """The same bits as one process with the same segments, for odd sizes and several chunks."""
    ranks = dist.get_world_size()
    for size, features, dtype in (
        (24, 6, torch.float32),
        (1000, 37, torch.float32),
        (512, 64, torch.bfloat16),
    ):
        place = Place(size)
        torch.manual_seed(3)
        inputs = make_inputs(61, features, size, bias=True, device=DEVICE, dtype=dtype)
        x, w, b = inputs.input, inputs.linear_weight, inputs.linear_bias
        own = {"linear_bias": b[place.classes], "group": place.group}
        for options in (
            {},
            {"label_smoothing": 0.1, "z_loss": 0.1},
            {"softcap": 3.0, "reduction": "none"},
            {"weight": torch.linspace(0.1, 1, size).to(dtype), "label_smoothing": 0.1},
        ):
            for workspace in (None, room(200_000)):
                given = {**options, "segments": 4, "workspace": workspace}
                alone = lowtide.linear_cross_entropy(x, w, inputs.target, linear_bias=b, **given)
                if "weight" in given:
                    given["weight"] = given["weight"][place.classes]
                found = lowtide.linear_cross_entropy(x, w[place.classes], inputs.target, **own, **given)
                assert torch.equal(alone, found), (size, options, (alone - found).abs().max())
        alone = lowtide.linear_log_probs(x, w, inputs.target, linear_bias=b, segments=4)
        found = lowtide.linear_log_probs(x, w[place.classes], inputs.target, **own, segments=4)
        assert all(torch.equal(*each) for each in zip(alone, found)), size
        sample = lowtide.linear_log_probs(x, w, inputs.target, linear_bias=b)
        assert (sample.log_prob - found.log_prob).abs().max() < 1e-4
    assert ranks in (2, 4)
