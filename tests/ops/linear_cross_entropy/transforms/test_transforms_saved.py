"""What backward needs, recomputed or saved elsewhere: checkpointing and hooks of saved tensors."""

from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.ops.linear_cross_entropy.kinds import KINDS, REDUCTIONS, loss_of_leaves
from tests.support.loss import (
    differentiate,
    fused,
    fused_log_probs,
    make_inputs,
)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("kind", ["all, classes", "all, probabilities"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_checkpointing(device, reduction, kind, use_reentrant):
    made, options = KINDS[kind]
    inputs = make_inputs(device=device, **made)
    loss, _ = loss_of_leaves(inputs, reduction=reduction, **options)
    leaves = inputs.leaves()
    plain = differentiate(fused, inputs, 0.3, reduction=reduction, **options)
    value = checkpoint(loss, *leaves.values(), use_reentrant=use_reentrant)
    value.backward(torch.full_like(value, 0.3))
    assert torch.equal(value.detach(), plain["loss"])
    for name, leaf in leaves.items():
        assert torch.equal(leaf.grad, plain[name]), name


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_log_probs(device, use_reentrant):
    inputs = make_inputs(device=device)

    def total(x, w):
        found = fused_log_probs(replace(inputs, input=x, linear_weight=w))
        return (found.log_prob + 0.1 * found.entropy + found.logsumexp).sum()

    leaves = (inputs.input, inputs.linear_weight)
    plain = torch.autograd.grad(total(*leaves), leaves)
    checkpoint(total, *leaves, use_reentrant=use_reentrant).backward()
    for leaf, expected in zip(leaves, plain):
        assert torch.equal(leaf.grad, expected)


class _Count(torch.utils._python_dispatch.TorchDispatchMode):
    """How often each operator of ours runs."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "lowtide":
            name = function.name().removeprefix("lowtide::")
            self.calls[name] = self.calls.get(name, 0) + 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_selective_checkpointing(device, reduction, keep):
    """By the operator's name: what is kept does not run again."""
    inputs = make_inputs(device=device, bias=True)
    plain = differentiate(fused, inputs, 0.3, reduction=reduction)
    op = torch.ops.lowtide.linear_cross_entropy.default

    def policy(context, function, *args, **kwargs):
        kept = keep and function is op
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def loss(*leaves):
        changed = replace(inputs, **dict(zip(inputs.leaves(), leaves)))
        return fused(replace(changed, input=changed.input * 1), reduction=reduction)

    with _Count() as count:
        value = checkpoint(
            loss,
            *inputs.leaves().values(),
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        )
        value.backward(torch.full_like(value, 0.3))
    assert count.calls["linear_cross_entropy"] == (1 if keep else 2)
    assert torch.equal(value.detach(), plain["loss"])
    for name, leaf in inputs.leaves().items():
        assert torch.equal(leaf.grad, plain[name]), name


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("retain", [False, True])
def test_saved_tensors_moved(device, retain, reduction):
    """save_on_cpu, and hooks that give other tensors of the same values."""
    inputs = make_inputs(device=device, bias=True, logit_scale=True)
    leaves = tuple(inputs.leaves().values())
    plain = differentiate(fused, inputs, reduction=reduction)
    for hooks in (
        torch.autograd.graph.save_on_cpu(),
        torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.clone(), lambda saved: saved.clone()),
    ):
        with hooks:
            loss = fused(inputs, reduction=reduction)
        for again in range(1 + retain):
            keep = retain and not again
            found = torch.autograd.grad(loss, leaves, torch.ones_like(loss), retain_graph=keep)
            for name, gradient in zip(inputs.leaves(), found):
                assert torch.equal(gradient, plain[name]), name


def test_log_probs_saved_on_cpu(device):
    inputs = make_inputs(device=device)
    leaves = (inputs.input, inputs.linear_weight)
    plain = torch.autograd.grad(fused_log_probs(inputs).entropy.sum(), leaves)
    with torch.autograd.graph.save_on_cpu():
        entropy = fused_log_probs(inputs).entropy
    for found, expected in zip(torch.autograd.grad(entropy.sum(), leaves), plain):
        assert torch.equal(found, expected)
