"""The operator with row_weight: torch's checks, torch.compile and torch.export.

Shapes: N tokens.
"""

import pytest
import torch

import lowtide
from lowtide.ops.linear_cross_entropy.definition.head import Options
from lowtide.ops.linear_cross_entropy.operator.fake import with_new_graph_facts
from tests.ops.linear_cross_entropy.calls import make_call
from tests.ops.linear_cross_entropy.options.helpers import WARNINGS
from tests.ops.linear_cross_entropy.options.test_options import REDUCTIONS
from tests.support.extended import all_extended_but

pytestmark = WARNINGS
OPERATORS = torch.ops.lowtide


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("probabilities", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_opcheck(device, reduction, probabilities, positions):
    if positions and reduction == "none":
        pytest.skip("each position is a call of its own")
    call = make_call((3,) if positions else (), device=device, probabilities=probabilities)
    target = call["target"]
    row_weight = torch.randn(6, *(3,) * positions, dtype=torch.float64, device=device)
    head = [[call["input"]], [call["linear_weight"]], None, None, target, None, row_weight, None]
    options = Options(reduction=reduction, z_loss=0.1, compute_dtype=torch.float64)
    wanted = (True, True, False, False)
    arguments = with_new_graph_facts("lowtide::linear_cross_entropy", (*head, wanted, *options))
    torch.library.opcheck(OPERATORS.linear_cross_entropy.default, arguments)
    if reduction == "none":
        loss_N, *statistics = OPERATORS.linear_cross_entropy(*arguments)
        backward = OPERATORS.linear_cross_entropy_backward.default
        torch.library.opcheck(backward, (torch.randn_like(loss_N), statistics, *arguments))


class Model(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.body = torch.nn.Linear(8, 8)
        self.criterion = lowtide.LinearCrossEntropyLoss(8, 21, bias=True, z_loss=0.1, **options)

    def forward(self, hidden, target, row_weight):
        return self.criterion(self.body(hidden).tanh(), target, row_weight=row_weight)


def batch(rows, device, positions):
    shape = (rows, *positions)
    return (
        torch.randn(rows, 8, device=device),
        torch.randint(21, shape, device=device),
        torch.randn(shape, device=device),
    )


def gradients(module, arguments):
    loss = module(*arguments)
    return torch.autograd.grad(loss, list(module.parameters()), torch.full_like(loss, 0.3))


@pytest.fixture
def traced(monkeypatch):
    """Restore torch.empty for the compiler and the exporter, which would trace conftest.py's."""
    monkeypatch.undo()
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("positions", [(), (2,)])
@pytest.mark.parametrize("reduction", all_extended_but(["mean"], REDUCTIONS))
def test_compile(device, reduction, positions, traced):
    model = Model(reduction=reduction, out_features=positions).to(device)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for rows in (9, 14):
        arguments = batch(rows, device, positions)
        for found, expected in zip(gradients(compiled, arguments), gradients(model, arguments)):
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("positions", [(), (2,)])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_export(device, reduction, positions, traced):
    model = Model(reduction=reduction, out_features=positions).to(device)
    rows = {0: torch.export.Dim("rows", min=2)}
    program = torch.export.export(model, batch(9, device, positions), dynamic_shapes=(rows, rows, rows))
    for length in (9, 14):
        arguments = batch(length, device, positions)
        for found, expected in zip(gradients(program.module(), arguments), gradients(model, arguments)):
            assert torch.equal(found, expected)
