"""Rows whose weight lies on few keys: a causal mask's first rows, few keys, sharp scores. There dz
is a small difference of two numbers, and neither may be rounded for itself: gradients err as eager
torch's do, whose scores and weights are float32.

The errors of one shape are luck: those of the rows that are nearest to a tie, and of the order of
sums. So the geometric mean over shapes is held against a limit; a single shape has twice as much.

Shapes: B batches, M queries, N keys, H heads, K features.
"""

import importlib
import math
import random
import statistics
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from lowtide import attn_bias as masks
from tests.ops.attention.helpers import (
    INTERPRETED,
    dense,
    differentiate,
    make_case,
    make_upstream,
    ours,
    scale_of,
    shown,
)
from tests.support.budgets import HALVES, norm
from tests.support.extended import all_extended_but
from tests.support.loss import skip_unless_runnable

pytestmark = [
    INTERPRETED,
    # A tile of queries that are all present may have keys that are absent. Their values are stored
    # nowhere.
    pytest.mark.filterwarnings("ignore:overflow encountered in:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered in:RuntimeWarning"),
]

MASKS = (None, masks.LowerTriangularMask(), masks.LowerTriangularFromBottomRightMask())
BIASES = (None, (0, 1, 0, 1), (0, 1, 1, 1))
SCALES = (None, 0.3, 1.0, 4.0)
SHAPES = {"torch": 24, "triton": 6}
ROWS = {"torch": 600, "triton": 150}
"""Of all batches and heads, at least."""


@dataclass(frozen=True)
class Way:
    """Shapes that a backend computes in its own way."""

    backend: str
    lengths: tuple[int, ...]
    features: tuple[int, ...] = (8, 32, 64, 96)
    batches: int = 1
    """At least."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What to set of launch_*.py, so that few problems are as many."""
    launches: tuple[str, ...] = ()
    """Kernels of the way in half precision, and in float32: some shape is to reach each."""
    launches_float: tuple[str, ...] = ()


ONE_TILE = (
    "launch_small_problems.problem_forward_kernel",
    "launch_small_problems.problem_gradient_kernel",
    "launch_recomputed.delta_kernel",
)
SHARED = "launch_small_problems.short_bias_gradient_kernel"
WAYS = {
    "torch": Way("torch", (1, 2, 3, 17, 64, 257, 700)),
    "triton": Way(
        "triton",
        (2, 3, 17, 64, 130),
        settings={"launch_backward.FEW_SCORES": 0},
        launches_float=("launch_stored_scores.scores_kernel",),
    ),
    "long": Way(
        "triton",
        (17, 70, 130),
        (72, 96),
        settings={"launch_backward.FEW_SCORES": 0, "launch_backward.MOST_POSITIONS": 0},
        launches_float=("launch_recomputed.key_value_gradient_kernel",),
    ),
    # The gradient of a bias of keys takes another way, which needs the low half that forward wrote.
    "one tile": Way(
        "triton",
        (2, 3, 17, 64),
        (8, 32, 64),
        1,
        {"launch_small_problems.FEWEST_PROBLEMS": 1},
        ONE_TILE,
        ONE_TILE,
    ),
    "short": Way(
        "triton",
        (17, 64, 130),
        (8, 32),
        2,
        {"launch_backward.PROBLEMS": 1},
        (SHARED,),
        (SHARED, "launch_recomputed.whole_problem_gradient_kernel"),
    ),
    # Long sequences in float32, whose strips would be too small for a card.
    "recomputed": Way(
        "triton",
        (2, 17, 70),
        (8, 32, 64),
        1,
        {"launch_backward._leaves_idle": lambda call, _: call.grad_bias is None},
        (),
        ("launch_recomputed.query_gradient_kernel", "launch_recomputed.key_value_gradient_kernel"),
    ),
}


def random_case(generator, way, dtype, device, **options):
    M, N = (generator.choice(way.lengths) for _ in range(2))
    N = max(N, 2)  # with one key only the value has a gradient
    H, K = generator.choice((1, 2, 4)), generator.choice(way.features)
    B = max(way.batches, math.ceil(ROWS[way.backend] / (M * H)))
    given = {"mask": generator.choice(MASKS), "bias": generator.choice(BIASES), **options}
    scale = {} if (scale := generator.choice(SCALES)) is None else {"scale": scale}
    return make_case(B, M, N, H, K=K, dtype=dtype, device=device, **({**scale, **given}))


def eager(case, products):
    """All in float32, but for the product of weights and values, in the dtype of `products`."""
    query, key, value = (each.float().transpose(1, 2) for each in (case.query, case.key, case.value))
    z_BHMN = (query @ key.mT) * scale_of(case)
    if case.bias is not None:
        z_BHMN = z_BHMN + case.bias.float()
    shown_BHMN = shown(case)
    nothing_BHM1 = ~shown_BHMN.any(-1, keepdim=True)
    weight_BHMN = z_BHMN.masked_fill(~shown_BHMN, -torch.inf).masked_fill(nothing_BHM1, 0).softmax(-1)
    weight_BHMN = weight_BHMN.masked_fill(nothing_BHM1, 0)
    out = (weight_BHMN.to(products) @ value.to(products)).transpose(1, 2)
    return out.to(case.query.dtype), z_BHMN.logsumexp(-1)


def error_ratios(case, backend, products):
    """Of each gradient, our error to that of eager torch and a rounding of float32."""
    upstream = (make_upstream(case)[0], None)
    exact = differentiate(dense, case.to(torch.float64), upstream)
    found = differentiate(ours, case, upstream, backend=backend)
    best = differentiate(lambda case: eager(case, products), case, upstream)
    for name in case.leaves():
        errors, size = [norm(each[name].double() - exact[name]) for each in (found, best)], norm(exact[name])
        # Where all terms of a gradient cancel, eager torch has none of its digits either. Few
        # numbers err by luck.
        if 0 < errors[1] < 0.02 * size and exact[name].numel() >= 32:
            rounding = torch.finfo(torch.float32).eps * size
            yield name, (errors[0] + 0.1 * rounding) / (errors[1] + rounding)


GRID = [
    *(("torch", dtype, dtype_of_products) for dtype, dtype_of_products in (
        (torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float16, torch.float32)
    )),
    *((way, dtype, dtype) for way in ("triton", "one tile", "short") for dtype in (torch.float32, *HALVES)),
    ("recomputed", torch.float32, torch.float32),
    ("long", torch.float32, torch.float32),
]  # fmt: skip
LIMITS = {torch.float32: 1.1, torch.bfloat16: 1.3, torch.float16: 1.3}


class Counted:
    """A kernel that counts its launches."""

    def __init__(self, kernel):
        self.kernel, self.launches = kernel, 0

    def __getitem__(self, grid):
        self.launches += 1
        return self.kernel[grid]


QUICKEST = GRID[11:12]  # the float16 of Triton's quickest way


@pytest.mark.parametrize(("name", "dtype", "products"), all_extended_but(QUICKEST, GRID))
def test_errors_of_eager(device, monkeypatch, name, dtype, products):
    """Ours round a product's weights only in Triton's kernels: tensor cores take no others."""
    way = WAYS[name]
    backend, counted = way.backend, {}
    skip_unless_runnable(backend, device)
    if device == "cpu" and backend == "triton" and dtype == torch.bfloat16:
        pytest.skip("the interpreter rounds to bfloat16 towards 0")
    for limit, value in way.settings.items():
        monkeypatch.setattr(f"lowtide.ops.attention.triton_backend.{limit}", value)
    for kernel in way.launches_float if dtype == torch.float32 else way.launches:
        module, _, attribute = kernel.partition(".")
        module = importlib.import_module(f"lowtide.ops.attention.triton_backend.{module}")
        counted[kernel] = Counted(getattr(module, attribute))
        monkeypatch.setattr(module, attribute, counted[kernel])
    generator, ratios = random.Random(name if way.settings else backend), {}
    for _ in range(SHAPES[backend]):
        for name, ratio in error_ratios(random_case(generator, way, dtype, device), backend, products):
            ratios.setdefault(name, []).append(ratio)
    assert ratios.keys() == {"query", "key", "value", "bias"}
    means = {name: statistics.geometric_mean(each) for name, each in ratios.items()}
    assert all(mean <= LIMITS[dtype] for mean in means.values()), means
    assert all(max(each) <= 2 * LIMITS[dtype] for each in ratios.values()), ratios
    assert all(each.launches for each in counted.values()), [*counted]
