"""What the tests of one option share: inputs with every other option, and warnings to expect."""

import pytest

from tests.ops.linear_cross_entropy.options.test_options import KINDS
from tests.support.loss import make_inputs

WARNINGS = [
    # Triton's interpreter computes with numpy, which warns of inf - inf.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    # torch.func.jvp, the compiler and the exporter import torch.jit and others, which are
    # deprecated.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
ALL = ["all, classes", "all, probabilities"]


def made_of(*sizes, kind="plain", **changes):
    """Make inputs of a kind, and return them with the kind's options."""
    made, options = {**KINDS, "plain": ({}, {})}[kind]
    return make_inputs(*sizes, **made | changes), options
