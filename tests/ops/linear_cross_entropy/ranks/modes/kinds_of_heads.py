"""Scenarios of divided heads of several kinds: with K dimensions, with several terms, with a padded
vocabulary, and as modules and DTensors.

Shapes: N tokens, D features, V classes of all ranks.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import lowtide
from lowtide.ops.linear_cross_entropy import dispatch
from lowtide.ops.linear_cross_entropy.definition.head import VocabShard
from tests.ops.linear_cross_entropy.ranks.place import D, N, Place, V, close, made
from tests.ops.linear_cross_entropy.ranks.vocab_parallel_ranks import room
from tests.support.budgets import dense
from tests.support.rank_errors import raised
from tests.support.ranks import mesh_of


def positions() -> None:
    """K-dimensional losses, with class indices and probabilities, a mean and its rows."""
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 1e-4)):
        positions_in(dtype, tolerance)


def positions_in(dtype: torch.dtype, tolerance: float) -> None:
    place, P = Place(), 3
    torch.manual_seed(1)
    x, w = torch.randn(N, D).double(), torch.randn(V, P, D).double()
    bias, target = torch.randn(V, P).double(), torch.randint(V, (N, P))
    target[torch.rand(N, P) < 0.2] = -100
    soft = torch.randn(N, V, P).double().softmax(1)
    for label, cut in ((target, target), (soft, soft[:, place.classes].to(dtype))):
        for reduction in ("mean", "none"):
            leaves = [place.leaf(each) for each in (x, w, bias)]
            logits = torch.einsum("nd,vpd->nvp", leaves[0], leaves[1]) + leaves[2]
            expected = F.cross_entropy(logits, label, reduction=reduction)
            wanted = torch.autograd.grad(expected.square().sum(), leaves)
            own = [place.leaf(x), place.leaf(w, place.classes), place.leaf(bias, place.classes)]
            own = [place.leaf(each.to(dtype)) for each in own]
            found = lowtide.linear_cross_entropy(
                own[0], own[1], cut, linear_bias=own[2], reduction=reduction, group=place.group
            )
            close(found.double(), expected.detach(), tolerance)
            gradients = [each.double() for each in torch.autograd.grad(found.square().sum(), own)]
            close(gradients[0], wanted[0], tolerance)
            for each, other in zip(gradients[1:], wanted[1:]):
                close(place.whole(each), other, tolerance)


def placed_positions() -> None:
    """The rows of a K-dimensional loss are placed as the input is, with K dimensions more."""
    place, P = Place(), 3
    torch.manual_seed(1)
    x, w, target = torch.randn(N, D).double(), torch.randn(V, P, D).double(), torch.randint(V, (N, P))
    leaves = [place.leaf(x), place.leaf(w)]
    expected = F.cross_entropy(torch.einsum("nd,vpd->nvp", *leaves), target, reduction="none")
    wanted = torch.autograd.grad(expected.square().sum(), leaves)
    mesh = mesh_of(place.ranks)
    for placement in (Replicate(), Shard(0)):
        tokens = [distribute_tensor(each, mesh, [placement]) for each in (x, target)]
        own = [tokens[0].requires_grad_(), distribute_tensor(w, mesh, [Shard(0)]).requires_grad_()]
        rows = lowtide.linear_cross_entropy(*own, tokens[1], reduction="none")
        assert rows.shape == (N, P)
        assert rows.placements == (placement,)
        close(rows.full_tensor().detach(), expected.detach())
        for found, other in zip(torch.autograd.grad(rows.square().sum(), own), wanted):
            close(found.full_tensor(), other)


def losses_of_placed_tokens() -> None:
    """Means over tokens that DTensors divide count those of all ranks, also by plain targets."""
    place, inputs, shape = Place(), made(), (2, N // 2)
    mesh = mesh_of(place.ranks)
    x, w = inputs.input.detach().view(*shape, D), inputs.linear_weight.detach()
    target = torch.arange(N).view(shape) % V
    target[0, : N // 4 + 1] = -100  # ranks count differently
    row = torch.tensor([1.0, 3.0], dtype=x.dtype)

    def means(x: Any, w: Any, target: Any) -> list[Any]:
        each = lowtide.losses.sequence_log_probs(x, w, target, reduction="mean")
        return [lowtide.losses.z_loss(x, w, target), each]

    leaves = [place.leaf(x), place.leaf(w)]
    expected = means(*leaves, target)
    wanted = torch.autograd.grad(expected[0] + (expected[1] * row).sum(), leaves)
    for placement in (Replicate(), Shard(1), Shard(0)):
        tokens = distribute_tensor(target, mesh, [placement])
        for labels in (tokens, tokens.to_local()):
            own = [distribute_tensor(x, mesh, [placement]), distribute_tensor(w, mesh, [Shard(0)])]
            own = [each.requires_grad_() for each in own]
            found = [each.full_tensor() for each in means(*own, labels)]
            for each, other in zip(found, expected):
                close(each.detach(), other.detach())
            gradients = torch.autograd.grad(found[0] + (found[1] * row).sum(), own)
            for each, other in zip(gradients, wanted):
                close(each.full_tensor(), other)
        message = raised(lambda: lowtide.tokens_per_rank(tokens, group=mesh))  # noqa: B023
        assert "must hold this rank's own targets, got a DTensor" in message
    with torch.no_grad():
        labels = distribute_tensor(target, mesh, [Replicate()])
        for each, other in zip(means(x, distribute_tensor(w, mesh, [Shard(0)]), labels), expected):
            close(each, other.detach())


def several_terms() -> None:
    """LoRA: x W^T + (x A^T) B^T, of which W and B are divided by classes."""
    place, r = Place(), 2
    torch.manual_seed(2)
    x, w, a, b = (torch.randn(*size).double() for size in ((N, D), (V, D), (r, D), (V, r)))
    target = torch.randint(V, (N,))
    leaves = [place.leaf(each) for each in (x, w, a, b)]
    expected = F.cross_entropy(leaves[0] @ leaves[1].T + leaves[0] @ leaves[2].T @ leaves[3].T, target)
    wanted = torch.autograd.grad(expected, leaves)
    own = [place.leaf(x), place.leaf(w, place.classes), place.leaf(a), place.leaf(b, place.classes)]
    shard = VocabShard(place.group.group_name, place.ranks, place.classes.start, V)
    inputs, weights = (own[0], own[0] @ own[2].T), (own[1], own[3])
    found = dispatch.cross_entropy(inputs, weights, target, shard=shard, workspace=room(40_000))
    close(found, expected.detach())
    gradients = torch.autograd.grad(found, own)
    for each, other, divided in zip(gradients, wanted, (False, True, False, True)):
        close(place.whole(each) if divided else each, other)


def padded_vocabulary() -> None:
    """Weights padded to as many rows on each rank, bias and class weights likewise; DTensors."""
    place, inputs, padded = Place(V + 8), made(bias=True, class_weight=True), V + 8
    options = {"label_smoothing": 0.1}
    expected = dense(inputs, **options)
    names = ("input", "linear_weight", "linear_bias")
    whole = dict(zip(names, torch.autograd.grad(expected, [getattr(inputs, name) for name in names])))

    def pad(tensor: Tensor) -> Tensor:
        rest = torch.full((padded - V, *tensor.shape[1:]), torch.nan, dtype=tensor.dtype)
        return torch.cat([tensor.detach(), rest])

    w, b, c = pad(inputs.linear_weight), pad(inputs.linear_bias), pad(inputs.weight)
    mesh = mesh_of(place.ranks)
    for dtensor in (False, True):
        x = place.leaf(inputs.input)
        own = [place.leaf(w, place.classes), place.leaf(b, place.classes)]
        how: dict[str, Any] = {"group": place.group}
        weight = c[place.classes]
        if dtensor:
            own, how = [distribute_tensor(each, mesh, [Shard(0)]).requires_grad_() for each in (w, b)], {}
            weight = distribute_tensor(c, mesh, [Shard(0)])
        loss = lowtide.linear_cross_entropy(
            x, own[0], inputs.target, linear_bias=own[1], weight=weight, num_classes=V, **how, **options
        )
        loss.backward()
        close(loss.detach(), expected.detach())
        close(x.grad, whole["input"])
        for each, name in zip(own, names[1:]):
            gradient = each.grad.to_local() if dtensor else each.grad
            gradient = place.whole(gradient)
            close(gradient[:V], whole[name])
            assert not gradient[V:].any()


def module_and_sequences() -> None:
    """LinearCrossEntropyLoss under parallelize_module; [B, S, D] by sequences; a DTensor's loss."""
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    place, inputs = Place(), made(bias=True, class_weight=True)
    mesh = mesh_of(place.ranks)
    criterion = lowtide.LinearCrossEntropyLoss(D, V, bias=True, weight=inputs.weight, dtype=torch.float64)
    with torch.no_grad():
        criterion.linear.weight.copy_(inputs.linear_weight)
        criterion.linear.bias.copy_(inputs.linear_bias)
    parallelize_module(criterion, mesh, {"linear": ColwiseParallel()})
    expected = dense(inputs)
    wanted = torch.autograd.grad(expected, (inputs.input, inputs.linear_weight, inputs.linear_bias))
    shape, S = (2, N // 2, D), N // 2
    whole = distribute_tensor(inputs.input.detach().view(shape), mesh, [Replicate()])
    labels = distribute_tensor(inputs.target.view(shape[:2]), mesh, [Replicate()])
    for placement in (Replicate(), Shard(1), Shard(0)):
        criterion.zero_grad()
        x = whole.redistribute(placements=[placement]).detach().requires_grad_()
        target = labels.redistribute(placements=[placement])
        loss = criterion(x, target)
        assert loss.placements == (Replicate(),)
        close(loss.to_local().detach(), expected.detach())
        loss.backward()
        assert x.grad.placements == (placement,)
        close(x.grad.full_tensor().view(N, D), wanted[0])
        close(criterion.linear.weight.grad.full_tensor(), wanted[1])
        close(criterion.linear.bias.grad.full_tensor(), wanted[2])
        rows = lowtide.linear_cross_entropy(x, criterion.linear.weight.detach(), target, reduction="none")
        assert rows.placements == (placement,)
        assert rows.shape == (2, S)
        expected_rows = dense(replace(inputs, linear_bias=None, weight=None), reduction="none")
        close(rows.full_tensor().view(N), expected_rows.detach())
