"""Warnings that the tests of options expect."""

import pytest

WARNINGS = [
    # Triton's interpreter computes with numpy, which warns of inf - inf.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    # torch.func.jvp, the compiler and the exporter import torch.jit and others, which are
    # deprecated.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
