"""What is trained in these tests, and the dense computation that it is compared with.

Shapes: B sequences, T tokens, D features, V classes.
"""

import copy
import functools
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from lowtide.ops.chunked_loss import chunked_loss
from tests.support.loss import norm

B, T, D, V = 2, 9, 8, 21
MODES = ["gradient_in_forward", "recompute"]
CHUNKS = [1, 5, 6, 1000]  # one row, uneven, even, more than there are


def cross_entropy(logits, labels, reduction="sum"):
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(wide), labels, reduction=reduction)


per_row = partial(cross_entropy, reduction="none")


class Norm(nn.Module):
    """RMS norm, linear, scale, soft cap: what heads are made of."""

    def __init__(self, bias=True):
        super().__init__()
        self.gain = nn.Parameter(torch.rand(D) + 0.5)
        self.linear = nn.Linear(D, V, bias=bias)
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, hidden):
        normed = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6) * self.gain
        return 5 * torch.tanh(self.linear(normed) * self.scale / 5)


class Adapted(nn.Module):
    """A frozen base and a trained adapter."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(D, V).requires_grad_(False)
        self.down, self.up = nn.Linear(D, 3, bias=False), nn.Linear(3, V, bias=False)

    def forward(self, hidden):
        return self.base(hidden) + 2 * self.up(self.down(hidden))


class Quantised(Adapted):
    """Likewise, the base in eight bits."""

    def __init__(self):
        super().__init__()
        weight = self.base.weight.detach()
        self.base = nn.Module()
        self.base.register_buffer("scale", weight.abs().amax(1, keepdim=True) / 127)
        self.base.register_buffer("codes", (weight / self.base.scale).round().to(torch.int8))
        self.base.forward = self.dequantised

    def dequantised(self, hidden):
        return F.linear(hidden, self.base.codes.to(hidden.dtype) * self.base.scale.to(hidden.dtype))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.linear = nn.Embedding(V, D), nn.Linear(D, V, bias=False)
        self.linear.weight = self.embedding.weight


HEADS = {
    "linear": lambda: nn.Linear(D, V),
    "norm": Norm,
    "adapted": Adapted,
    "quantised": Quantised,
    "two layers": lambda: nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D), nn.GELU(), nn.Linear(D, V)),
}


def make(kind="norm", *, device="cpu", dtype=torch.float64, ignored=0.3, tokens=T):
    """(head, hidden states, labels)"""
    head = HEADS[kind]().to(device, dtype)
    hidden = torch.randn(B, tokens, D, dtype=dtype, device=device, requires_grad=True)
    labels = torch.randint(V, (B, tokens))
    labels[torch.rand(B, tokens) < ignored] = -100
    return head, hidden, labels.to(device)


def dense(loss_fn, head, hidden, *token_tensors, **_):
    """Compute what chunked_loss does, with all rows at once."""
    parts = hidden if isinstance(hidden, tuple) else (hidden,)
    leading = parts[0].shape[:-1]

    def flat(tensor):
        cut = isinstance(tensor, torch.Tensor) and tensor.dim()
        return tensor.reshape(-1, *tensor.shape[len(leading) :]) if cut else tensor

    value = loss_fn(head(*map(flat, parts)), *map(flat, token_tensors))
    if isinstance(value, tuple):
        return value
    return value.view(leading) if value.dim() else value


def leaves(head, hidden):
    parts = hidden if isinstance(hidden, tuple) else (hidden,)
    parameters = head.parameters() if isinstance(head, nn.Module) else ()
    return [each for each in (*parts, *parameters) if each.requires_grad]


def close(found, expected, dtype=torch.float64, roundings=0):
    """Within three times as many roundings as dense computation makes: two for ours, one for the
    dense result that it is compared with, which has an error of its own."""
    assert len(found) == len(expected)
    for ours, want in zip(found, expected):
        assert ours.shape == want.shape
        assert ours.device == want.device
    for ours, want in zip(_grouped(found), _grouped(expected)):
        allowed = max(roundings, _roundings_of_heads(want.device.type))
        error = norm(ours - want)
        assert error <= 3 * allowed * torch.finfo(dtype).eps * norm(want), error


def _grouped(tensors):
    """Join tensors of one number, which may be right by luck, to the largest tensor."""
    vectors = sorted((each.detach().double().flatten() for each in tensors), key=len)
    numbers = [each for each in vectors[:-1] if len(each) == 1]
    return [*vectors[len(numbers) : -1], torch.cat([*numbers, vectors[-1]])]


def roundings_of(eager, exact):
    """The largest relative error of the dense tensors, by norm, in roundings of float32."""
    errors = [norm(own.double() - true) / norm(true) for own, true in zip(eager, exact) if norm(true)]
    return max(errors, default=0) / torch.finfo(torch.float32).eps


@functools.cache
def _roundings_of_heads(device):
    """The roundings of dense computation on this device, in eight calls of every head."""
    eager, exact = [], []
    with torch.random.fork_rng(devices=[0] if device == "cuda" else []):
        torch.manual_seed(0)
        for kind in 8 * list(HEADS):
            head, hidden, labels = make(kind, device=device, dtype=torch.float32)
            for results, own, h in ((eager, head, hidden), (exact, *cast(head, hidden))):
                loss = dense(cross_entropy, own, h, labels)
                results += [loss.detach(), *torch.autograd.grad(loss, leaves(own, h))]
    return roundings_of(eager, exact)


def cast(head, hidden, dtype=torch.float64):
    """Copies with the same values, in another dtype."""
    return copy.deepcopy(head).to(dtype), hidden.detach().to(dtype).requires_grad_()


def relative(found, truth):
    return ((found.double() - truth).norm() / truth.norm().clamp_min(1e-300)).item()


def gradients(loss_of, head, hidden, labels, use=lambda loss: loss / 18, **options):
    loss = loss_of(cross_entropy, head, hidden, labels, **options)
    return torch.autograd.grad(use(loss), leaves(head, hidden))


def check(head, hidden, labels, use=lambda loss: loss, *, loss_fn=cross_entropy, of=None, **options):
    """Loss and gradients after `use` of the loss, chunked and dense."""
    options = {"chunk_size": 5} | options

    def run(loss_of, head, hidden, of):
        loss = loss_of(loss_fn, head, hidden, labels, **options)
        value = loss.detach().clone()
        return [value, *torch.autograd.grad(use(loss).sum(), of or leaves(head, hidden))]

    exact, roundings = run(dense, head, hidden, of), 0
    if isinstance(head, nn.Module) and isinstance(hidden, torch.Tensor) and not of:
        narrow, narrow_hidden = cast(head, hidden, torch.float32)
        narrow_hidden.requires_grad_(hidden.requires_grad)
        roundings = roundings_of(run(dense, narrow, narrow_hidden, of), exact)
    close(run(chunked_loss, head, hidden, of), exact, roundings=roundings)


def call(loss_fn=cross_entropy, head=None, hidden=None, *rest, **options):
    own_head, own_hidden, labels = make("linear")
    return chunked_loss(
        loss_fn, head or own_head, own_hidden if hidden is None else hidden, *(rest or (labels,)), **options
    )
