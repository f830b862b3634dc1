"""The number of launches of a small call. A launch takes the host longer than the device to run it.

Launches are counted under Triton's interpreter: kernels in Triton, and operations of torch other
than views and allocations. On a card some of these operations launch two kernels.

Shapes: N tokens, D features, V classes.
"""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.loss import interpreted, make_inputs, planned

pytest.importorskip("triton")

from triton.runtime import interpreter

import lowtide
from lowtide.ops.linear_cross_entropy.engines import row_loss_triton
from tests.ops.linear_cross_entropy.on_exponentials import put_everywhere

pytestmark = [
    pytest.mark.skipif(not interpreted(), reason="counts what the interpreter launches"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

LAUNCH_NOTHING = {"empty", "empty_like", "empty_strided", "new_empty", "promote_types"}


@pytest.fixture(autouse=True)
def _nothing_is_zero_by_luck():
    """Leave new memory unwritten, since to fill it would count as a launch."""


class Launches(TorchDispatchMode):
    """Count launches by name, including those inside lowtide's operators."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "lowtide":
            with self:
                return function.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args)
        name = function._schema.name.partition("::")[2]
        results = [each.alias_info for each in function._schema.returns]
        view = any(alias is not None and not alias.is_write for alias in results)
        if not view and name not in LAUNCH_NOTHING:
            self.found[name] += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture
def launches(monkeypatch):
    counted = Launches()
    launch = interpreter.GridExecutor.__call__

    def launch_and_count(self, *arguments, **options):
        counted.found[self.fn.__name__] += 1
        # Operations of the interpreter on tensors are not launches.
        with torch.utils._python_dispatch._disable_current_modes():
            return launch(self, *arguments, **options)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch_and_count)
    # Only on the CPU the values of targets are checked.
    monkeypatch.setattr(row_loss_triton, "check_classes", lambda *arguments: None)
    return counted


def step(launches, dtype, engine, way, **options):
    inputs = make_inputs(8, 32, 144, dtype=dtype)
    made = planned(inputs, None, backend="triton", **options)
    assert (made.engine, made.weight_gradient) == (engine, way)
    with launches:
        loss = lowtide.linear_cross_entropy(
            inputs.input, inputs.linear_weight, inputs.target, backend="triton", **options
        )
        of_forward = launches.found.total()
        torch.autograd.grad(loss, (inputs.input, inputs.linear_weight), torch.ones_like(loss))
    return of_forward, launches.found.total() - of_forward


# These numbers may only fall.


@pytest.mark.parametrize(
    ("reduction", "forward", "backward"), [("mean", 19, 3), ("sum", 19, 3), ("none", 11, 16)]
)
def test_exponentials(launches, monkeypatch, reduction, forward, backward):
    """On the CPU the harness adds conversions of operands to float32, and of a product back."""
    put_everywhere("cpu", monkeypatch)
    found = step(launches, torch.bfloat16, "exponentials", "single_product", reduction=reduction)
    assert found == (forward, backward), launches.found


@pytest.mark.parametrize(("options", "forward"), [({}, 7), ({"label_smoothing": 0.1, "z_loss": 0.01}, 7)])
def test_logits(launches, options, forward):
    """On the CPU plain torch scales the gradients, a launch more for each that has two factors."""
    found = step(launches, torch.float32, "logits_triton", "accumulate", **options)
    assert found == (forward, 5), launches.found
