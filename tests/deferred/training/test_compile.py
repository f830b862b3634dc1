"""Models and losses that torch.func and torch.compile trace, beside the same without the
deferral.
"""

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from tests.deferred.helpers import GPT, V, differentiated, make
from tests.ops.chunked_loss.helpers import close
from tests.support.extended import all_extended_but
from tests.support.graphs import needs_tracing

# torch.compile's own warning, of a graph's inputs that have a history
quiet = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


def test_torch_func():
    model, tokens, targets = make()
    parameters = dict(model.named_parameters())

    def loss(parameters):
        return torch.func.functional_call(model, parameters, (tokens, targets))[1]

    expected = torch.func.grad(loss)(parameters)
    with lowtide.defer_logits(model):
        found = torch.func.grad(loss)(parameters)
    close(list(found.values()), list(expected.values()))


@needs_tracing
@pytest.mark.parametrize(
    "backend", all_extended_but(["eager", "aot_eager"], ["eager", "aot_eager", "inductor"])
)
def test_compile_one_graph(backend):
    model, tokens, targets = make(tied=True)
    loss = model(tokens, targets)[1]
    expected = differentiated(model, loss)
    torch._dynamo.reset()
    with lowtide.defer_logits(model):
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        logits, loss = compiled(tokens, targets)
        close(differentiated(model, loss), expected)
        assert type(logits).__name__ == "DeferredLogits"
        logits = compiled(tokens)[0]
        outside = F.cross_entropy(logits.view(-1, V), targets.view(-1), ignore_index=-1)
        close(differentiated(model, outside), expected)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="its guards do not look at a submodule's class")
@needs_tracing
def test_compile_before_deferral():
    model, tokens, _ = make()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert isinstance(compiled(tokens)[0], torch.Tensor)
    with lowtide.defer_logits(model):
        assert type(compiled(tokens)[0]).__name__ == "DeferredLogits"
    assert isinstance(compiled(tokens)[0], torch.Tensor)


def sigmoid(logits, targets):
    return logits.sigmoid().mean()


def in_place(logits, targets):
    logits = logits * 2
    logits[..., 0] = 0.0
    return F.cross_entropy(logits.view(-1, V), targets.view(-1), ignore_index=-1)


GRAPH = {
    "classes second": lambda z, y: F.cross_entropy(z.transpose(1, 2), y, ignore_index=-1),
    "soft cap, shifted": lambda z, y: F.cross_entropy(
        (5 * torch.tanh(z / 5))[:, :-1].reshape(-1, V), y[:, 1:].flatten(), ignore_index=-1
    ),
    "log-probabilities": lambda z, y: z.log_softmax(-1).gather(-1, y.clamp(min=0)[..., None]).mean(),
    "logsumexp": lambda z, y: z.logsumexp(-1).square().mean(),
}


def in_place_views(logits, targets):
    flat = logits.view(-1, V)
    logits[..., :5] += 0.25
    logits[:, -1] /= 0.7
    return F.cross_entropy(flat, targets.view(-1), ignore_index=-1)


REAL = {"real logits": sigmoid, "a change in place": in_place, "changes of views": in_place_views}
BREAKS = {
    "CrossEntropyLoss": lambda z, y: nn.CrossEntropyLoss(ignore_index=-1)(z.view(-1, V), y.view(-1)),
    "argmax": lambda z, y: z.logsumexp(-1).mean() + z.argmax(-1).double().mean(),
    "entropy": lambda z, y: (z.log_softmax(-1).exp() * z.log_softmax(-1)).sum(-1).mean(),
}


@needs_tracing
@quiet
@pytest.mark.parametrize(
    "name",
    all_extended_but(["classes second", "logsumexp", *REAL, "CrossEntropyLoss"], [*GRAPH, *REAL, *BREAKS]),
)
def test_compile(name):
    """In one graph, or right nevertheless."""
    use = (GRAPH | REAL | BREAKS)[name]
    model, tokens, targets = make()
    loss = use(model(tokens)[0], targets)
    expected = differentiated(model, loss)
    torch._dynamo.reset()
    with lowtide.defer_logits(model):
        compiled = torch.compile(
            lambda: use(model(tokens)[0], targets), fullgraph=name not in BREAKS, backend="eager"
        )
        warns = pytest.warns(lowtide.deferred.RealLogitsWarning) if name in REAL else contextlib.nullcontext()
        with warns:
            loss = compiled()
        close(differentiated(model, loss), expected)


@needs_tracing
@quiet
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("compiled_autograd", [False, True])
def test_step_with_backward(compiled_autograd, monkeypatch):
    """An entropy by chunks, and its backward, in a compiled step; both run eagerly."""
    monkeypatch.undo()  # conftest.py's torch.empty would be traced
    model, tokens, _ = make()

    def entropy():
        log_probs = model(tokens)[0].log_softmax(-1)
        return (log_probs.exp() * log_probs).sum(-1).square().mean()

    expected = differentiated(model, entropy())
    torch._dynamo.reset()
    with (
        lowtide.defer_logits(model) as deferral,
        torch._dynamo.config.patch(compiled_autograd=compiled_autograd),
    ):
        torch.compile(lambda: entropy().backward(), backend="aot_eager")()
        assert deferral.fused == 1
    close([each.grad for each in model.parameters()], expected[1:])


@needs_tracing
@pytest.mark.filterwarnings("ignore::lowtide.deferred.RealLogitsWarning")
def test_compile_real_logits_without_gradients():
    """A number that is logged takes no gradient; the loss of the same logits keeps its own."""
    model, tokens, targets = make()

    def step():
        logits = model(tokens)[0]
        with torch.no_grad():
            spread = logits.std()
        return F.cross_entropy(logits.view(-1, V), targets.view(-1), ignore_index=-1), spread

    loss, spread = step()
    expected = [loss.detach(), spread, *torch.autograd.grad(loss, list(model.parameters()))]
    torch._dynamo.reset()
    with lowtide.defer_logits(model):
        loss, spread = torch.compile(step, fullgraph=True, backend="eager")()
        close([loss.detach(), spread, *torch.autograd.grad(loss, list(model.parameters()))], expected)


def cross_entropy(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


LOSSES = {
    "cross_entropy": cross_entropy,
    "log-probabilities": GRAPH["log-probabilities"],
    "logsumexp": GRAPH["logsumexp"],
}


@needs_tracing
@quiet
@pytest.mark.parametrize("name", LOSSES)
def test_compiled_loss_of_an_eager_model(name):
    """One graph serves all steps, though each changes the weight's version."""
    model, tokens, targets = make()
    plain, graphs = copy.deepcopy(model), []
    torch._dynamo.reset()
    compiled = torch.compile(
        LOSSES[name], fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph
    )
    with lowtide.defer_logits(model) as deferral:
        for _ in range(3):
            found = differentiated(model, compiled(model(tokens)[0], targets))
            close(found, differentiated(plain, LOSSES[name](plain(tokens)[0], targets)))
            with torch.no_grad():
                for each, change in zip((*model.parameters(), *plain.parameters()), found[1:] * 2):
                    each.sub_(change)
    assert len(graphs) == 1
    assert deferral.fused == 3
    assert deferral.materialized == {}


@needs_tracing
@quiet
def test_compiled_loss_module_of_an_eager_model():
    model, tokens, targets = make()
    criterion = nn.CrossEntropyLoss(ignore_index=-1)
    torch._dynamo.reset()
    compiled = torch.compile(criterion, backend="eager")

    def use(model, criterion):
        return differentiated(model, criterion(model(tokens)[0].view(-1, V), targets.view(-1)))

    expected = use(model, criterion)
    with lowtide.defer_logits(model) as deferral:
        close(use(model, compiled), expected)
    assert deferral.fused == 1


class DisabledHead(GPT):
    """The head runs eagerly within a compiled model."""

    @torch.compiler.disable
    def logits(self, x):
        return self.lm_head(x)

    def forward(self, tokens, targets):
        return cross_entropy(self.logits(torch.tanh(self.mlp(self.wte(tokens)))), targets)


@needs_tracing
@quiet
def test_compiled_model_of_an_eager_head():
    _, tokens, targets = make()
    model = DisabledHead().double()
    expected = differentiated(model, model(tokens, targets))
    torch._dynamo.reset()
    with lowtide.defer_logits(model) as deferral:
        compiled = torch.compile(model, backend="eager")
        for _ in range(2):
            close(differentiated(model, compiled(tokens, targets)), expected)
    assert deferral.fused == 2
