"""F.linear and F.cross_entropy as chunks run them: used where they fit, and as exact as torch's."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lowtide.ops.chunked_loss import operators
from lowtide.ops.chunked_loss.operators import CrossEntropy
from tests.ops.chunked_loss.helpers import (
    MODES,
    B,
    D,
    T,
    V,
    check,
    chunked_loss,
    close,
    cross_entropy,
    dense,
    leaves,
    make,
    roundings_of,
)
from tests.support.loss import norm, skip_unless_runnable


@pytest.fixture
def calls(monkeypatch):
    """How often each is used."""
    found = {"linear": 0, "cross_entropy": 0}

    def counted(name, function):
        def wrapper(*args):
            found[name] += 1
            return function(*args)

        return wrapper

    monkeypatch.setattr(operators.SummingLinear, "apply", counted("linear", operators.SummingLinear.apply))
    monkeypatch.setattr(CrossEntropy, "apply", counted("cross_entropy", CrossEntropy.apply))
    return found


@pytest.fixture
def fused(device, monkeypatch):
    """On the CPU the kernel runs through Triton's interpreter, here alone."""
    skip_unless_runnable("triton", device)
    monkeypatch.setattr(operators, "runs_fused", lambda logits: True)


# F.linear.


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sizes", [(0, 6), (D, 0), (0, 0)])
def test_linear_without_features_or_outputs(device, sizes, mode, calls):
    """AdaptiveLogSoftmaxWithLoss makes one of 0 features from a small width and many cutoffs."""
    weight = torch.zeros(sizes[::-1], dtype=torch.float64, device=device, requires_grad=True)
    bias = torch.randn(sizes[1], dtype=torch.float64, device=device, requires_grad=True)
    hidden = torch.randn(B, T, sizes[0], dtype=torch.float64, device=device, requires_grad=True)
    head = partial(F.linear, weight=weight, bias=bias)
    loss = chunked_loss(lambda logits: logits.square().sum(), head, hidden, chunk_size=5, mode=mode)
    found = torch.autograd.grad(loss, [hidden, weight, bias])
    close(found, [torch.zeros_like(hidden), torch.zeros_like(weight), 2 * B * T * bias.detach()])
    assert calls["linear"]


@pytest.mark.parametrize("form", ["module", "positions", "keywords"])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_accumulates_gradients(device, bias, form, calls):
    head = nn.Linear(D, V, bias=bias).to(device, torch.float64)
    _, hidden, labels = make(device=device)
    parts = {"weight": head.weight, "bias": head.bias}
    whole = {
        "module": head,
        "positions": partial(lambda weight, bias, hidden: F.linear(hidden, weight, bias), *parts.values()),
        "keywords": partial(F.linear, **parts),
    }[form]
    check(whole, hidden, labels, chunk_size=6, of=leaves(head, hidden))
    assert calls["linear"] == 3


def test_linear_weight_used_elsewhere(device, calls):
    head = nn.Linear(D, V).to(device, torch.float64)
    _, hidden, labels = make(device=device)

    def twice(module, hidden):
        return module(hidden) + hidden @ module.weight.t() + F.linear(hidden[:, None], module.weight)[:, 0]

    check(partial(twice, head), hidden, labels, chunk_size=6, of=leaves(head, hidden))
    assert calls["linear"] == 6


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(1, V), (1,), ()])
def test_linear_bias_of_other_shape(device, shape, mode):
    weight = torch.randn(V, D, dtype=torch.float64, device=device, requires_grad=True)
    bias = torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True)
    _, hidden, labels = make(device=device)
    check(partial(F.linear, weight=weight, bias=bias), hidden, labels, mode=mode, of=[hidden, weight, bias])


def test_linear_float16_scale_probe(device):
    """The backward pass that finds a chunk's scale goes through a linear layer of the loss."""
    _, hidden, labels = make("linear", device=device, dtype=torch.float32)
    head = nn.Linear(D, D).to(device)
    critic = nn.Linear(D, V).to(device)

    def loss_fn(critic, features, labels, weight):
        return (cross_entropy(critic(features), labels, "none") * weight).sum()

    weight = torch.rand(B, T, device=device).half()  # whose dtype makes the call one of float16
    results = []
    for loss_of in (chunked_loss, dense):
        loss = loss_of(partial(loss_fn, critic), head, hidden, labels, weight, chunk_size=5)
        results.append(torch.autograd.grad(loss, [hidden, *head.parameters(), *critic.parameters()]))
    close(*results, torch.float32)


# F.cross_entropy.


def rows(device, dtype=torch.float32):
    """Logits whose confidence differs, and -inf among them; classes."""
    logits = (torch.randn(37, V) * torch.logspace(-2, 1.5, 37)[:, None]).to(device, dtype)
    target = torch.randint(V - 1, (37,), device=device)
    logits[::5, V - 1] = -torch.inf
    return logits, target


@pytest.mark.parametrize("upstream", ["ones", "any"])
def test_cross_entropy_of_rows(device, upstream):
    skip_unless_runnable("triton", device)
    logits, target = rows(device)
    ignored = torch.rand(37, device=device) < 0.3
    logits[ignored] = torch.nan  # not read
    seed = torch.ones(37, device=device) if upstream == "ones" else torch.randn(37, device=device)
    ours = logits.clone().requires_grad_()
    losses = CrossEntropy.apply(ours, target, ignored)
    found = [losses.detach(), *torch.autograd.grad(losses, ours, seed)]
    kept = ~ignored
    assert torch.equal(found[0][ignored], torch.zeros_like(found[0][ignored]))
    assert torch.equal(found[1][ignored], torch.zeros_like(found[1][ignored]))
    results = []
    for dtype in (torch.float32, torch.float64):
        own = logits[kept].to(dtype).requires_grad_()
        losses = F.cross_entropy(own, target[kept], reduction="none")
        results.append([losses.detach(), *torch.autograd.grad(losses, own, seed[kept].to(dtype))])
    for mine, eager, exact in zip(found, *results):
        rounding = torch.finfo(torch.float32).eps * norm(exact)
        assert norm(mine[kept].double() - exact) <= 2 * norm(eager.double() - exact) + rounding


def test_cross_entropy_double_backward(device):
    skip_unless_runnable("triton", device)
    logits, target = rows(device)
    logits[::5, V - 1] = -3
    ignored = torch.rand(37, device=device) < 0.3
    seed = torch.randn(37, device=device)

    def run(losses_of, dtype):
        own = logits.to(dtype).requires_grad_()
        (gradient,) = torch.autograd.grad(losses_of(own), own, seed.to(dtype), create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), own)

    def eager(own):
        return F.cross_entropy(own, target.masked_fill(ignored, -100), reduction="none")

    exact = run(eager, torch.float64)
    ours = run(lambda own: CrossEntropy.apply(own, target, ignored), torch.float32)
    close(ours, exact, torch.float32, roundings_of(run(eager, torch.float32), exact))


FITTING = {
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "ignore_index": {"reduction": "sum", "ignore_index": 3},
}
OTHER = {
    "weight": {"reduction": "sum", "weight": torch.linspace(0.5, 2, V)},
    "label_smoothing": {"reduction": "sum", "label_smoothing": 0.1},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", [*FITTING, *OTHER])
def test_cross_entropy_in_a_loss(device, options, mode, fused, calls):
    head, hidden, labels = make("linear", device=device, dtype=torch.float32)
    keywords = (FITTING | OTHER)[options]
    labels = labels.masked_fill(labels == -100, keywords.get("ignore_index", -100))
    if "weight" in keywords:
        keywords = keywords | {"weight": keywords["weight"].to(device)}

    def loss_fn(logits, labels):
        return F.cross_entropy(logits, labels, **keywords).sum()

    found, eager, exact = ([], [], [])
    for results, loss_of, dtype in (
        (found, chunked_loss, torch.float32),
        (eager, dense, torch.float32),
        (exact, dense, torch.float64),
    ):
        if dtype == torch.float64:
            calls = dict(calls)
            head, hidden = head.double(), hidden.detach().double().requires_grad_()
            keywords = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in keywords.items()}
        loss = loss_of(loss_fn, head, hidden, labels, chunk_size=5, mode=mode)
        results += [loss.detach(), *torch.autograd.grad(loss / 7, leaves(head, hidden))]
    assert calls["cross_entropy"] == (0 if options in OTHER else 4 * (1 + (mode == "recompute")))
    for mine, plain, true in zip(found, eager, exact):
        rounding = torch.finfo(torch.float32).eps * norm(true)
        assert norm(mine.double() - true) <= 2 * norm(plain.double() - true) + rounding


@pytest.mark.parametrize("mode", MODES)
def test_cross_entropy_leaves_logits(device, mode, fused, calls):
    """What is also made of them has its own gradient."""
    head, hidden, labels = make("linear", device=device, dtype=torch.float32)

    def loss_fn(logits, labels):
        loss = F.cross_entropy(logits, labels, reduction="sum")
        return loss + 0.1 * logits.logsumexp(-1).square().sum() + logits.exp().sum()

    results = []
    for loss_of in (chunked_loss, dense):
        loss = loss_of(loss_fn, head, hidden, labels, chunk_size=5, mode=mode)
        results.append([loss.detach(), *torch.autograd.grad(loss / 7, leaves(head, hidden))])
    close(*results, torch.float32)
    assert calls["cross_entropy"] > 0


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_cross_entropy_no_grad(device, context, fused, calls):
    head, hidden, labels = make("linear", device=device, dtype=torch.float32)
    with context():
        found = chunked_loss(cross_entropy, head, hidden * 1, labels, chunk_size=5)
        expected = dense(cross_entropy, head, hidden * 1, labels)
    close([found], [expected.clone()], torch.float32)
    assert calls["cross_entropy"] == 4


@pytest.mark.parametrize("device", ["cpu"])  # on CUDA an assertion ends the process
def test_cross_entropy_class_out_of_range(device, fused):
    head, hidden, labels = make("linear", dtype=torch.float32)
    labels[0, 0] = V
    with pytest.raises(RuntimeError, match="single nonzero value"):
        chunked_loss(cross_entropy, head, hidden, labels)
