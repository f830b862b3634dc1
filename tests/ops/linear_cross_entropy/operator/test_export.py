"""torch.export of what is trained: the program's module has the gradients of the original."""

import pytest
import torch

import lowtide

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # the exporter's own imports give these
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

KINDS = {
    "plain": {},
    "all": {"softcap": 2.0, "z_loss": 0.1, "logit_scale": 0.5, "label_smoothing": 0.1},
    "positions": {"out_features": (3,), "label_smoothing": 0.1},
}


@pytest.fixture(autouse=True)
def _nothing_is_zero_by_luck():
    """The exporter has its own torch.empty: conftest.py's would be traced."""


class Model(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.body = torch.nn.Linear(8, 8)
        self.criterion = lowtide.LinearCrossEntropyLoss(8, 21, bias=True, **options)

    def forward(self, hidden, target):
        return self.criterion(self.body(hidden).tanh(), target)


class Scores(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(8, 21)

    def forward(self, hidden, target):
        found = lowtide.linear_log_probs(hidden, self.head.weight, target, linear_bias=self.head.bias)
        return found.log_prob + 0.1 * found.entropy - 0.2 * found.logsumexp


def batch(device, rows=9, positions=()):
    return torch.randn(rows, 8, device=device), torch.randint(21, (rows, *positions), device=device)


def gradients(module, arguments):
    loss = module(*arguments)
    return torch.autograd.grad(loss, list(module.parameters()), torch.full_like(loss, 0.3))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_export_trained(device, reduction, kind, dynamic):
    model = Model(reduction=reduction, **KINDS[kind]).to(device)
    rows = {0: torch.export.Dim("rows", min=2)} if dynamic else None
    positions = KINDS[kind].get("out_features", ())
    example = batch(device, positions=positions)
    program = torch.export.export(model, example, dynamic_shapes=(rows, rows) if dynamic else None)
    for length in (9, 14) if dynamic else (9,):
        arguments = batch(device, length, positions)
        for found, expected in zip(gradients(program.module(), arguments), gradients(model, arguments)):
            assert torch.equal(found, expected)


def test_export_log_probs_differentiated(device):
    model = Scores().to(device)
    program = torch.export.export(model, batch(device))
    arguments = batch(device)
    for found, expected in zip(gradients(program.module(), arguments), gradients(model, arguments)):
        assert torch.equal(found, expected)


def test_saved_graph(device):
    """Backward twice, with other gradients upstream."""
    model = Model().to(device)
    module, arguments = torch.export.export(model, batch(device)).module(), batch(device)
    loss = module(*arguments)
    first, second = (
        torch.autograd.grad(loss * factor, list(module.parameters()), retain_graph=True) for factor in (1, 3)
    )
    for one, three in zip(first, second):
        torch.testing.assert_close(3 * one, three)


def test_export_second_derivatives(device):
    model = Model(**KINDS["all"]).to(device).double()
    hidden, target = batch(device)
    arguments = (hidden.double(), target)
    found = []
    for module in (torch.export.export(model, arguments).module(), model):
        parameters = list(module.parameters())
        first = torch.autograd.grad(module(*arguments), parameters, create_graph=True)
        found.append(torch.autograd.grad(sum(each.square().sum() for each in first), parameters))
    for ours, expected in zip(*found):
        torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("way", ["no_grad", "frozen"])
@pytest.mark.parametrize("make", [Model, Scores])
def test_export_no_grad_backward_raises(device, make, way):
    """Rather than to leave out the gradients that it was not made for."""
    model = make().to(device)
    if way == "frozen":
        head = model.criterion.linear if make is Model else model.head
        head.weight.requires_grad_(False)
    with torch.set_grad_enabled(way == "frozen"):
        module = torch.export.export(model, batch(device)).module()
    for parameter in module.parameters():
        parameter.requires_grad_()
    loss = module(*batch(device))
    with pytest.raises(RuntimeError, match="exported where a tensor that needs a gradient now needed none"):
        loss.sum().backward()


def test_export_then_compile(device):
    model = Model().to(device)
    module, arguments = torch.export.export(model, batch(device)).module(), batch(device)
    torch.compiler.reset()
    compiled = torch.compile(module, backend="aot_eager")
    loss = compiled(*arguments)
    for found, expected in zip(
        torch.autograd.grad(loss, list(module.parameters())), gradients(model, arguments)
    ):
        torch.testing.assert_close(0.3 * found, expected)
    torch.compiler.reset()


@pytest.mark.parametrize("kind", ["plain", "all"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_export(device, dynamic, kind):
    options = (
        {} if kind == "plain" else {"softcap": 2.0, "z_loss": 0.1, "logit_scale": 0.5, "reduction": "none"}
    )
    model = Model(**options).to(device)
    hidden, target = torch.randn(9, 8, device=device), torch.randint(21, (9,), device=device)
    rows = {0: torch.export.Dim("rows", min=2)} if dynamic else None
    program = torch.export.export(model, (hidden, target), dynamic_shapes=(rows, rows) if dynamic else None)
    names = {str(node.target) for node in program.graph.nodes}
    assert "lowtide.linear_cross_entropy.default" in names
    for length in (9, 14) if dynamic else (9,):
        hidden = torch.randn(length, 8, device=device)
        target = torch.randint(21, (length,), device=device)
        torch.testing.assert_close(program.module()(hidden, target), model(hidden, target))


def test_export_log_probs(device):
    class AllScores(torch.nn.Module):
        def forward(self, hidden, weight, target):
            return tuple(lowtide.linear_log_probs(hidden, weight, target))

    arguments = (
        torch.randn(9, 8, device=device),
        torch.randn(21, 8, device=device),
        torch.randint(21, (9,), device=device),
    )
    program = torch.export.export(AllScores(), arguments)
    for found, expected in zip(program.module()(*arguments), lowtide.linear_log_probs(*arguments)):
        torch.testing.assert_close(found, expected)
