"""Functions of rows in compiled graphs, where they run eagerly."""

import pytest
import torch

from tests.core.rowwise.functions import by_rows, dense, made
from tests.support.graphs import needs_tracing

pytestmark = [
    needs_tracing,
    # Dynamo itself reads .grad of an intermediate; the compiler imports torch.jit and others.
    pytest.mark.filterwarnings("ignore:The .grad attribute"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _nothing_is_zero_by_luck():
    """The compiler has its own torch.empty: conftest.py's would be traced."""


@pytest.fixture(autouse=True)
def _afresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("compiled_autograd", [False, True])
def test_gradients(compiled_autograd):
    tensors, upstream = made(), torch.randn(7, dtype=torch.float64)

    def step(*tensors):
        (by_rows(*(each.sin() for each in tensors)).exp() * upstream).sum().backward()

    with torch._dynamo.config.patch(compiled_autograd=compiled_autograd):
        torch.compile(step, backend="aot_eager")(*tensors)
    loss = (dense(*(each.sin() for each in tensors)).exp() * upstream).sum()
    expected = torch.autograd.grad(loss, tensors)
    torch.testing.assert_close(tuple(each.grad for each in tensors), expected, rtol=1e-11, atol=1e-12)


def test_fullgraph_refused():
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"eagerly: compile the step without fullgraph"):
        torch.compile(by_rows, backend="eager", fullgraph=True)(*made())
