"""Calls with ignored rows in many patterns, which skip them whatever it costs."""

import math
from dataclasses import replace

import pytest
import torch

from lowtide.ops.linear_cross_entropy.planning import remembered
from lowtide.ops.linear_cross_entropy.planning.division import sizes, step_time
from tests.ops.linear_cross_entropy.on_exponentials import (
    dtype_on,
    everywhere,  # noqa: F401
)
from tests.support.loss import (
    make_inputs,
)

N, V = 75, 101
PATTERNS = ["none", "all", "all but one", "one", "prefixes", "suffix", "random"]
OPTIONS = [
    {"label_smoothing": 0.1},
    {"softcap": 3.0},
    {"z_loss": 0.02, "label_smoothing": 0.3, "logit_scale": -1.3},
    {"z_loss": 0.02, "softcap": 5.0, "logit_scale": 1.7},
]


@pytest.fixture(autouse=True)
def any_number_of_tokens(monkeypatch):
    """Skip rows at any price, but with class blocks; cuBLAS then reads cleared rows."""
    monkeypatch.setattr(sizes, "FEWEST_TOKENS", 1)
    monkeypatch.setattr(sizes, "MOST_OF_SKIPPING", math.inf)
    monkeypatch.setattr(step_time, "ORDER_OF_ROWS", 0)
    remembered.forget()
    yield
    remembered.forget()


def ignored(pattern: str, N: int = N) -> torch.Tensor:
    row_N = torch.arange(N)
    return {
        "none": row_N < 0,
        "all": row_N >= 0,
        "all but one": row_N != 2 * N // 3,
        "one": row_N == N // 2,
        "prefixes": row_N % 25 < 18,
        "suffix": row_N >= N // 3,
        "random": torch.rand(N, generator=torch.Generator().manual_seed(1)) < 0.8,
    }[pattern]


def with_ignored(inputs, pattern: str, ignore_index: int = -100):
    ignored_N = ignored(pattern, inputs.target.numel()).to(inputs.target.device)
    target = torch.randint(inputs.linear_weight.shape[0], inputs.target.shape, device=inputs.target.device)
    return replace(inputs, target=target.masked_fill(ignored_N.view(target.shape), ignore_index))


def inputs_for(device: str, pattern: str, tokens: int = N, **more):
    inputs = make_inputs(tokens, 24, V, device=device, **{"dtype": dtype_on(device), **more})
    return with_ignored(inputs, pattern)
