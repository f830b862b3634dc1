"""No tensor of [N, V] ever exists, as the allocator sees it; of real logits it sees several.

Shapes: N tokens, D features, V classes.
"""

import pytest
import torch
import torch.nn.functional as F

import lowtide
from lowtide.deferred import RealLogitsWarning
from lowtide.memory import peak_memory
from tests.deferred.helpers import GPT
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
