"""What the tests of row_weight share: inputs with a factor of each row's loss."""

import torch

from tests.ops.linear_cross_entropy.options.test_options import KINDS
from tests.support.loss import make_inputs

ALL = ["all, classes", "all, probabilities"]


def weighted(*sizes, kind="plain", **changes):
    """Make inputs of a kind with row weights, and return them with the kind's options."""
    made, options = {**KINDS, "plain": ({}, {})}[kind]
    return make_inputs(*sizes, row_weight=True, **made | changes), options


def upstream_of(inputs, reduction):
    return torch.randn(inputs.leading, device=inputs.input.device) if reduction == "none" else -0.7
