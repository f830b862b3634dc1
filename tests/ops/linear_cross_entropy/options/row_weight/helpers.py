"""What the tests of row_weight share: inputs with a factor of each row's loss."""

import torch

from tests.ops.linear_cross_entropy.options.helpers import made_of


def weighted(*sizes, **changes):
    """Make inputs of a kind with row weights, and return them with the kind's options."""
    return made_of(*sizes, row_weight=True, **changes)


def upstream_of(inputs, reduction):
    return torch.randn(inputs.leading, device=inputs.input.device) if reduction == "none" else -0.7
