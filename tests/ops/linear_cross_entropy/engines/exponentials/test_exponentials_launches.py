"""What a chunk launches on the path without a pass over logits: small calls wait for little else.

Views and allocations are left out. Without a card, through the interpreter.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.loss import fused, fused_log_probs, make_inputs

pytest.importorskip("triton")

from lowtide.ops.linear_cross_entropy.engines.exponentials import (
    engine,
    recompute,
    row_coefficients,
    row_log_probs,
    target_order,
)
from lowtide.ops.linear_cross_entropy.engines.exponentials.gemm import gemm_triton as kernels
from lowtide.ops.linear_cross_entropy.engines.weight_gradient import row_kernels, target_rows
from tests.ops.linear_cross_entropy.on_exponentials import everywhere  # noqa: F401

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's"),
]

STATISTICS = [
    "_target_logits_kernel",
    "exponentials_kernel",
    "_sum_kernel",
    "exponentials_kernel",  # the maxima: returns at once, and so does what follows
    "_references_kernel",
    "exponentials_kernel",
    "_coefficients_kernel",
]
GRADIENTS = ["_scale_rows_kernel", "mm", "_add_target_rows_kernel", "mm", "_input_gradient_kernel"]
AGAIN = ["_order_kernel", "_target_logits_kernel", "exponentials_kernel", "_coefficients_kernel", *GRADIENTS]
# In tests torch.empty fills what it allocates (tests/support/unwritten.py).
ALLOCATIONS = {"empty", "empty_like", "new_empty", "fill_", "promote_types"}


class Launches(TorchDispatchMode):
    """Keeps the names of operations and kernels, not of what the interpreter does in a kernel."""

    def __init__(self):
        super().__init__()
        self.names, self.inside = [], False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if not (self.inside or function.is_view or name in ALLOCATIONS):
            self.names.append(name)
        return function(*args, **(kwargs or {}))

    def counted(self, kernel, name):
        def launch(grid):
            def run(*arguments, **options):
                self.names.append(name)
                self.inside = True
                kernel[grid](*arguments, **options)
                self.inside = False

            return run

        return type("Counted", (), {"__getitem__": staticmethod(launch)})()


@pytest.fixture
def launches(everywhere, monkeypatch):  # noqa: F811
    found = Launches()
    for module in (
        kernels,
        recompute,
        row_coefficients,
        row_log_probs,
        target_order,
        row_kernels,
        target_rows,
    ):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, found.counted(getattr(module, name), name))
    walk = engine.ExponentialsEngine.walk_tokens

    def walk_counted(self, *arguments):
        with found:
            return walk(self, *arguments)

    monkeypatch.setattr(engine.ExponentialsEngine, "walk_tokens", walk_counted)
    return found


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_launches_of_a_loss(launches, reduction):
    inputs = make_inputs(16, 24, 101, device="cpu", dtype=torch.float32)
    loss = fused(inputs, backend="triton", reduction=reduction)
    assert launches.names == (
        ["_order_kernel", *STATISTICS, *GRADIENTS] if reduction == "mean" else STATISTICS
    )
    launches.names.clear()
    loss.sum().backward()
    assert launches.names == (AGAIN if reduction == "none" else [])


def test_launches_of_log_probs(launches):
    inputs = make_inputs(16, 24, 101, device="cpu", dtype=torch.float32)
    found = fused_log_probs(inputs, backend="triton")
    assert launches.names == [
        "_target_logits_kernel",
        "exponentials_kernel",
        "_mark_infinite_kernel",
        "exponentials_kernel",
        "_log_probs_kernel",
        "_coefficients_kernel",
    ]
    launches.names.clear()
    found[0].sum().backward()
    assert launches.names == AGAIN
