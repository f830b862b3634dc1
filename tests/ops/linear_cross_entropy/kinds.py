"""Calls with nothing and with everything, as functions of their leaves.

Shapes: N tokens, D features, V classes.
"""

from dataclasses import replace

import torch

from tests.support.loss import fused, make_inputs

REDUCTIONS = ("mean", "sum", "none")

# The arguments of make_inputs, and the options of the call.
KINDS = {
    "plain": ({}, {}),
    "all, classes": (
        {"logit_scale": True, "bias": True, "class_weight": True},
        {"softcap": 1.5, "z_loss": 0.3, "label_smoothing": 0.1},
    ),
    "all, probabilities": (
        {"logit_scale": True, "bias": True, "class_weight": True, "probabilities": True},
        {"softcap": 1.5, "z_loss": 0.3, "label_smoothing": 0.1},
    ),
}


def small(device, kind, *, dtype=torch.float64, **more):
    made, options = KINDS[kind]
    return make_inputs(5, 3, 4, device=device, dtype=dtype, **made, **more), options


def loss_of_leaves(inputs, loss_of=fused, **options):
    """A function of the leaves' values, in their order, and those values."""
    names = list(inputs.leaves())

    def loss(*leaves):
        return loss_of(replace(inputs, **dict(zip(names, leaves))), **options)

    return loss, tuple(leaf.detach() for leaf in inputs.leaves().values())


def assert_close(found, expected):
    """In float64, beside a few roundings."""
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)
