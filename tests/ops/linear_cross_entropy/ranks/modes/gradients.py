"""Scenarios of ways to differentiate and to run a divided head: gradients of some leaves,
checkpoints, autocast, half precision, Triton's pass, torch.compile.

Shapes: N tokens, D features, V classes of all ranks.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.ops.linear_cross_entropy.ranks import equal_values
from tests.ops.linear_cross_entropy.ranks.counted_collectives import counted
from tests.ops.linear_cross_entropy.ranks.place import D, N, Place, V, close, made
from tests.ops.linear_cross_entropy.ranks.vocab_parallel_ranks import room
from tests.support.budgets import dense
from tests.support.loss import check, check_log_probs, make_inputs, planned, rows_for
from tests.support.rank_errors import raised
from tests.support.ranks import DEVICE


def wanted_gradients() -> None:
    """Each combination of gradients, for a mean and for rows."""
    place, inputs = Place(), made(bias=True)
    for reduction in ("mean", "none"):
        for wants in ((True, False, False), (False, True, False), (False, False, True), (False,) * 3):
            leaves = [inputs.input, inputs.linear_weight, inputs.linear_bias]
            parts = (None, place.classes, place.classes)
            own = [place.leaf(*each).requires_grad_(want) for *each, want in zip(leaves, parts, wants)]
            loss = lowtide.linear_cross_entropy(
                own[0], own[1], inputs.target, linear_bias=own[2], group=place.group, reduction=reduction
            )
            expected = dense(inputs, reduction=reduction)
            close(loss.detach(), expected.detach())
            assert loss.requires_grad == any(wants)
            if any(wants):
                loss.sum().backward()
            whole = torch.autograd.grad(expected.sum(), leaves)
            for each, other, part, want in zip(own, whole, parts, wants):
                assert (each.grad is not None) == want
                if want:
                    close(each.grad, other if part is None else other[part])


def ways_to_differentiate() -> None:
    """A retained graph with other upstream gradients, a checkpoint, autocast; what is refused."""
    place, inputs = Place(), made()
    x, w = place.leaf(inputs.input), place.leaf(inputs.linear_weight, place.classes)
    for reduction in ("mean", "none"):
        loss = lowtide.linear_cross_entropy(x, w, inputs.target, group=place.group, reduction=reduction)
        expected = dense(inputs, reduction=reduction)
        leaves = (inputs.input, inputs.linear_weight)
        for upstream in (1.5, -0.3):
            gradients = torch.autograd.grad(loss.sum() * upstream, (x, w), retain_graph=True)
            whole = torch.autograd.grad(expected.sum() * upstream, leaves, retain_graph=True)
            close(gradients[0], whole[0])
            close(gradients[1], whole[1][place.classes])
        again = checkpoint(
            lambda x, w, how=reduction: lowtide.linear_cross_entropy(
                x * 1.0, w, inputs.target, group=place.group, reduction=how
            ).sum(),
            *(x, w),
            use_reentrant=False,
        )
        gradients = torch.autograd.grad(again, (x, w))
        whole = torch.autograd.grad(expected.sum(), leaves)
        close(gradients[0], whole[0])
        for refused in (
            lambda loss=loss: torch.autograd.grad(loss.sum(), x, create_graph=True),
            lambda: torch.func.grad(
                lambda x: lowtide.linear_cross_entropy(x, w, inputs.target, group=place.group)
            )(x),
            lambda: lowtide.linear_cross_entropy(x, w, inputs.target, group=place.group, backend="reference"),
        ):
            assert "has first derivatives by backward alone" in raised(refused)
    half = made(rows=rows_for(DEVICE, torch.bfloat16, N), dtype=torch.float32)
    x, w = place.leaf(half.input), place.leaf(half.linear_weight, place.classes)
    whole = [place.leaf(half.input), place.leaf(half.linear_weight)]
    with torch.autocast(DEVICE, torch.bfloat16):
        loss = lowtide.linear_cross_entropy(x, w, half.target, group=place.group)
        expected = lowtide.linear_cross_entropy(*whole, half.target)
    assert loss.dtype == torch.float32
    loss.backward()
    expected.backward()
    if DEVICE == "cuda":  # where products of bfloat16 have results of bfloat16, those of each rank
        found = {"loss": loss.detach(), "input": x.grad, "linear_weight": place.whole(w.grad)}
        rounded = {name: found[name].bfloat16() for name in ("input", "linear_weight")}
        check(found | rounded, half.to(torch.bfloat16))
        return
    for found, one_process in (
        (loss, expected),
        (x.grad, whole[0].grad),
        (w.grad, whole[1].grad[place.classes]),
    ):
        close(found, one_process, 1e-5)


def half_precision() -> None:
    """float16 with a loss scale, and bfloat16 whose weight gradient is formed by class blocks."""
    place = Place(512)
    for dtype, workspace, upstream in (
        (torch.float16, None, 2.0**12),
        (torch.float16, None, 2.0**-12),
        (torch.bfloat16, None, 1.0),
        (torch.bfloat16, 80_000 if DEVICE == "cpu" else 170_000, 1.0),
    ):
        torch.manual_seed(5)
        inputs = make_inputs(rows_for(DEVICE, dtype, 48), 64, 512, device=DEVICE, dtype=dtype)
        x, w = place.leaf(inputs.input), place.leaf(inputs.linear_weight, place.classes)
        backend = "torch" if DEVICE == "cpu" else "auto"
        plan = planned(
            replace(inputs, linear_weight=w), workspace, ranks=place.ranks, num_classes=512, backend=backend
        )
        assert (plan.weight_gradient == "class_blocks") == (workspace is not None)
        loss = lowtide.linear_cross_entropy(x, w, inputs.target, group=place.group, workspace=workspace)
        (loss * upstream).backward()
        actual = {"loss": loss.detach(), "input": x.grad, "linear_weight": place.whole(w.grad)}
        check(actual, inputs, upstream=upstream)


def triton() -> None:
    """The Triton pass, which CUDA tensors take; on the CPU in its interpreter."""
    place, options = Place(), {"bias": True, "row_weight": True, "logit_scale": True}
    inputs = made(dtype=torch.float32, **options)
    more = {"label_smoothing": 0.1, "softcap": 4.0, "z_loss": 0.05}
    x, w = place.leaf(inputs.input), place.leaf(inputs.linear_weight, place.classes)
    b, s = place.leaf(inputs.linear_bias, place.classes), place.leaf(inputs.logit_scale)
    given = {"linear_bias": b, "logit_scale": s, "group": place.group, "backend": "triton"}
    loss = lowtide.linear_cross_entropy(
        x, w, inputs.target, **given, row_weight=inputs.row_weight, workspace=room(60_000), **more
    )
    loss.backward()
    actual = {"input": x.grad, "linear_weight": place.whole(w.grad), "linear_bias": place.whole(b.grad)}
    check({"loss": loss.detach(), **actual, "logit_scale": s.grad}, inputs, **more)

    inputs = made(dtype=torch.float32)
    x, w = place.leaf(inputs.input), place.leaf(inputs.linear_weight, place.classes)
    found = lowtide.linear_log_probs(x, w, inputs.target, group=place.group, backend="triton")
    upstream = [torch.linspace(-1, 1, N).double(), torch.linspace(1, 2, N).double(), None]
    torch.autograd.backward(found[:2], [each.float() for each in upstream[:2]])
    results = {name: each.detach() for name, each in found._asdict().items()}
    gradients = {"input": x.grad, "linear_weight": place.whole(w.grad)}
    check_log_probs({**results, **gradients}, inputs, upstream)

    assert planned(inputs, None, backend="triton").engine == "logits_triton"
    with counted() as calls:
        lowtide.linear_cross_entropy(x, w, inputs.target, group=place.group, backend="triton").backward()
    assert calls == [("gather", 2048), ("gather", 3 * N * 4), ("sum_", N * D * 4)]


def compiled() -> None:
    """torch.compile of a call with a group: one graph, with the collectives inside the operator."""
    place, inputs = Place(), made(dtype=torch.float32)
    x, w = place.leaf(inputs.input), place.leaf(inputs.linear_weight, place.classes)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def loss_of(x: Tensor, w: Tensor) -> Tensor:
        return lowtide.linear_cross_entropy(
            x * 2, w, inputs.target, group=place.group, first_class=place.classes.start, num_classes=V
        )

    loss = loss_of(x, w)
    loss.backward()
    doubled = replace(inputs, input=(2 * inputs.input.detach()).requires_grad_())
    actual = {"loss": loss.detach(), "input": x.grad / 2, "linear_weight": place.whole(w.grad)}
    check(actual, doubled)

    with pytest.MonkeyPatch.context() as patch:  # one host has read an earlier call's answer
        patch.setattr(equal_values, "differed", lambda _: ["target"] if place.rank == 0 else [])
        message = raised(lambda: loss_of(x, w))
    assert "target must be the same on all ranks" in message
    assert loss_of(x, w) == loss
