"""No tensor of [N, V] ever exists, as the allocator sees it; of real logits it sees several.

Shapes: N tokens, D features, V classes.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.deferred import RealLogitsWarning
from lowtide.memory import peak_memory
from tests.deferred.helpers import GPT, check, make, plain_and_deferred
from tests.support.extended import all_extended_but

# So many rows of float32 logits take more than the default workspace: 64 MiB on the CPU, 1 GiB on
# CUDA.
ROWS = {"cpu": 640, "cuda": 16384}
D, V = 8, 32768


def shifted(logits, targets):
    logits = logits[..., :-1, :].contiguous().float()
    return F.cross_entropy(logits.view(-1, V), targets[..., 1:].reshape(-1))


def per_token(logits, targets):
    log_prob = logits.log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
    return (log_prob * torch.rand_like(log_prob)).sum()


def entropy(logits, targets):
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1).mean()


USES = {
    "cross_entropy": lambda z, y: F.cross_entropy(z.view(-1, V), y.view(-1)),
    "classes second, soft cap": lambda z, y: F.cross_entropy((30 * torch.tanh(z / 30)).transpose(1, 2), y),
    "smoothing, class weights": lambda z, y: torch.nn.CrossEntropyLoss(
        weight=torch.ones(V, dtype=z.dtype, device=y.device), label_smoothing=0.1
    )(z.flatten(0, 1), y.flatten()),
    "shifted": shifted,
    "per token": per_token,
    "logsumexp": lambda z, y: z.logsumexp(-1).square().mean(),
    "entropy": entropy,
    "largest": lambda z, y: z.topk(3, -1).values.sum(),
}


def prepared(device, dtype):
    N = ROWS[device] * 4 // dtype.itemsize
    model = GPT(features=D, classes=V).to(device, dtype)
    tokens, targets = torch.randint(V, (2, 2, N // 2), device=device)
    return model, tokens, targets


def step(model, tokens, targets, use):
    use(model(tokens)[0], targets).backward()
    model.zero_grad(set_to_none=True)


# test_workspace.py bounds the memory of others.
QUICK = [("cross_entropy", torch.bfloat16), *((name, torch.float32) for name in ("per token", "largest"))]


@pytest.mark.parametrize(
    ("name", "dtype"),
    all_extended_but(QUICK, [("cross_entropy", torch.bfloat16), *((name, torch.float32) for name in USES)]),
)
def test_memory_without_logits(device, name, dtype):
    model, tokens, targets = prepared(device, dtype)
    logits = ROWS[device] * V * 4
    with lowtide.defer_logits(model) as deferral:
        with peak_memory(device) as peak:
            step(model, tokens, targets, USES[name])
        assert deferral.materialized == {}
    assert peak.largest < logits
    with peak_memory(device) as dense:
        step(model, tokens, targets, USES[name])
    assert dense.largest >= logits, "the dense path fails this test"
    assert dense.bytes > peak.bytes


@pytest.mark.parametrize("what", ["argmax", "topk", "accuracy"])
def test_memory_without_logits_outside_loss(device, what):
    model, tokens, targets = prepared(device, torch.float32)
    uses = {
        "argmax": lambda z: z.argmax(-1),
        "topk": lambda z: torch.topk(z, 5, dim=-1),
        "accuracy": lambda z: (z.detach().view(-1, V).argmax(1) == targets.view(-1)).float().mean(),
    }
    with lowtide.defer_logits(model), peak_memory(device) as peak:
        logits, loss = model(tokens, targets)
        uses[what](logits)
        loss.backward()
    assert peak.largest < ROWS[device] * V * 4


def test_memory_between_forward_and_backward(device):
    """One gradient of the head and its input, which the loss has formed already; none of a row."""
    model, tokens, targets = prepared(device, torch.float32)
    with lowtide.defer_logits(model), peak_memory(device) as peak:
        logits, _ = model(tokens, targets)
    workspace = {"cpu": 64 << 20, "cuda": 1 << 30}[device]
    activations = 8 * ROWS[device] * D * 4
    assert peak.bytes <= workspace + model.lm_head.weight.nbytes + activations
    assert logits.shape == (*tokens.shape, V)


def test_memory_detects_real_logits(device):
    model, tokens, _ = prepared(device, torch.float32)
    warns = pytest.warns(RealLogitsWarning, match="sigmoid")
    with lowtide.defer_logits(model), peak_memory(device) as peak, warns:
        model(tokens)[0].sigmoid()
    assert peak.largest >= ROWS[device] * V * 4


def pieces(logits, targets):
    """Return the sum of the losses of single sequences."""
    return sum(F.cross_entropy(z, y) for z, y in zip(logits, targets))


def test_memory_of_losses_of_pieces(device):
    """One of them may hold the head's gradient; backward holds two more, of a piece and the sum."""
    features, classes = 256, 4096
    model = GPT(features=features, classes=classes).to(device)
    tokens, targets = torch.randint(classes, (2, 16, 8), device=device)
    peaks = []
    with lowtide.defer_logits(model, workspace=2 << 20) as deferral:
        for sequences in (4, 16):
            with peak_memory(device) as peak:
                step(model, tokens[:sequences], targets[:sequences], pieces)
            peaks.append(peak.bytes)
    assert (deferral.fused, deferral.materialized) == (4 + 16, {})
    assert peaks[1] < peaks[0] + model.lm_head.weight.nbytes / 2


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_losses_of_pieces(reduction, weighted):
    model, tokens, targets = make()
    weight = torch.rand(63, dtype=torch.float64)
    options = {"reduction": reduction, "label_smoothing": 0.1, "ignore_index": -1}

    def use(model):
        z = model(tokens)[0]
        weights = weight.to(z.dtype) if weighted else None
        return sum(F.cross_entropy(*each, weights, **options) for each in zip(z, targets))

    check(model, use, fused=len(tokens), dtype=torch.float64)


def test_losses_of_pieces_in_a_checkpoint():
    """Its two runs compute the pieces alike, with a loss outside that holds the gradient."""
    model, tokens, targets = make(dtype=torch.float32)

    def use(model):
        each = [F.cross_entropy(model(tokens[:1])[0][0], targets[0], ignore_index=-1)]
        for row, target in zip(tokens[1:], targets[1:]):
            run = lambda row, target: model(row[None], target[None])[1]  # noqa: E731
            each.append(checkpoint(run, row, target, use_reentrant=False))
        return sum(each)

    expected, found, _ = plain_and_deferred(model, use)
    torch.testing.assert_close(found, expected)


def test_later_step_forms_gradients_in_forward():
    """A loss whose backward has run holds nothing, though the variable lives."""
    model, tokens, targets = make(dtype=torch.float32)
    with lowtide.defer_logits(model) as deferral:
        losses = []
        for _ in range(2):
            assert not deferral._counts.holds_gradient
            losses.append(model(tokens[:1], targets[:1])[1])
            assert deferral._counts.holds_gradient
            losses[-1].backward()
        losses = [model(tokens[:1], targets[:1])[1]]
        assert deferral._counts.holds_gradient
        losses.clear()
        assert not deferral._counts.holds_gradient
