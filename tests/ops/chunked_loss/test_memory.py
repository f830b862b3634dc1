"""The promise of chunked_loss, counted by the allocator: beyond hidden states, their gradient and
the head's, one chunk. And from below: the dense computation breaks it.

Shapes: N rows, C rows of a chunk, D features, V classes.
"""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lowtide.memory import peak_memory
from lowtide.ops.chunked_loss import chunked_loss
from tests.ops.chunked_loss.helpers import MODES, cross_entropy, dense, leaves

N, C, D, V = 512, 32, 8, 4096
DTYPES = [torch.float32, torch.bfloat16]


def prepared(device, dtype, rows=N):
    head = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, V)).to(device, dtype)
    hidden = torch.randn(rows, D, device=device).to(dtype).requires_grad_()
    return head, hidden, torch.randint(V, (rows,), device=device)


def peaks(loss_of, head, hidden, labels, **options):
    """Of forward and backward, each above what it found, and of the largest tensor; at last."""
    upstream = torch.ones((), device=hidden.device)
    for _ in range(2):
        for leaf in leaves(head, hidden):
            leaf.grad = None
        with peak_memory(hidden.device) as forward:
            loss = loss_of(cross_entropy, head, hidden, labels, **options)
        with peak_memory(hidden.device) as backward:
            loss.backward(upstream)
        del loss
    return forward.bytes, backward.bytes, max(forward.largest, backward.largest)


def held_by_gradients(head, hidden):
    """Theirs, and where they are half precision their float32 sums."""
    sums = sum(parameter.numel() * 4 for parameter in head.parameters() if parameter.dtype != torch.float32)
    return sum(leaf.nbytes for leaf in leaves(head, hidden)) + sums


def of_one_chunk(device, dtype):
    """What dense computation takes for a chunk of rows, with gradients, whatever it takes twice."""
    head, hidden, labels = prepared(device, dtype, C)
    forward, backward, _ = peaks(dense, head, hidden, labels)
    return forward + backward


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_one_chunk_and_gradients(device, dtype, mode):
    head, hidden, labels = prepared(device, dtype)
    allowed = of_one_chunk(device, dtype) + held_by_gradients(head, hidden)
    forward, backward, largest = peaks(chunked_loss, head, hidden, labels, chunk_size=C, mode=mode)
    assert max(forward, backward) <= allowed
    assert largest < N * V * dtype.itemsize / 4
    if mode == "gradient_in_forward":
        assert backward < C * V * dtype.itemsize, "gradients are scaled in place"
    forward, backward, largest = peaks(dense, head, hidden, labels)
    assert forward + backward > 4 * allowed
    assert largest >= N * V * dtype.itemsize


@pytest.mark.parametrize("mode", MODES)
def test_memory_independent_of_rows(device, mode):
    """But for the gradient of the rows themselves."""
    found = []
    for rows in (N, 4 * N):
        head, hidden, labels = prepared(device, torch.float32, rows)
        forward, backward, _ = peaks(chunked_loss, head, hidden, labels, chunk_size=C, mode=mode)
        found.append(max(forward, backward) - hidden.nbytes)
    assert found[1] <= found[0] + N * 64


@pytest.mark.parametrize("mode", MODES)
def test_memory_of_chunk_freed(device, mode):
    """Its logits and everything that refers to them, without the garbage collector."""
    head, hidden, labels = prepared(device, torch.float32)
    alive, counts = [], []

    def loss_fn(logits, labels):
        counts.append(sum(each() is not None for each in alive))
        alive.append(weakref.ref(logits.untyped_storage()))
        return cross_entropy(logits.tanh().exp(), labels)

    gc.disable()
    try:
        loss = chunked_loss(loss_fn, head, hidden, labels, chunk_size=C, mode=mode)
        loss.backward()
    finally:
        gc.enable()
    assert len(counts) == N // C * (1 if mode == "gradient_in_forward" else 2)
    assert max(counts) == 0
    assert not any(each() is not None for each in alive)


def test_memory_of_frozen_head(device):
    head, hidden, labels = prepared(device, torch.float32)
    trained, _, _ = peaks(chunked_loss, head, hidden, labels, chunk_size=4)
    head.requires_grad_(False)
    frozen, _, _ = peaks(chunked_loss, head, hidden, labels, chunk_size=4)
    assert frozen <= trained - V * D * 4


@pytest.mark.parametrize("mode", MODES)
def test_shifted_slice_not_copied(device, mode):
    base = torch.randn(2, 2049, 512, device=device, requires_grad=True)
    small = nn.Linear(512, 8).to(device)
    labels = torch.randint(8, (2, 2048), device=device)
    with peak_memory(device) as peak:
        chunked_loss(cross_entropy, small, base.detach()[:, :-1], labels, chunk_size=C, mode=mode)
    assert peak.bytes < base.nbytes / 8


@pytest.mark.parametrize("mode", MODES)
def test_memory_of_second_derivatives(device, mode):
    head, hidden, labels = prepared(device, torch.float32)
    with peak_memory(device) as peak:
        loss = chunked_loss(cross_entropy, head, hidden, labels, chunk_size=C, mode=mode)
        gradients = torch.autograd.grad(loss / N, leaves(head, hidden), create_graph=True)
        sum(each.square().sum() for each in gradients).backward()
    assert peak.bytes < N * V * 4
    assert peak.largest < N * V * 4 / 4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [0.02, 0.1, 0.4])
def test_workspace_kept(device, dtype, share):
    head, hidden, labels = prepared(device, dtype)
    hidden = hidden.detach().view(1, N, D).requires_grad_()
    labels = labels.view(1, N)
    forward, backward, _ = peaks(dense, head, hidden, labels)
    workspace = int(share * (forward + backward))
    sizes = []

    def loss_fn(logits, labels):
        sizes.append(len(logits))
        return cross_entropy(logits, labels)

    def chunked(_, *arguments, **options):
        return chunked_loss(loss_fn, *arguments, **options)

    found, after, _ = peaks(chunked, head, hidden, labels, workspace=workspace)
    # Rows are measured without the memory that an operator takes for itself while it runs.
    slack = 0.1 * workspace
    assert max(found, after) <= workspace + held_by_gradients(head, hidden) + slack
    steps = -(-N // sizes[-2])
    assert sizes[-steps:] == sizes[-2 * steps : -steps], "measured once, then kept"
    assert sizes[-2] * V * dtype.itemsize > workspace / 16, "but not much less"


def test_checkpointing_ignores_measured_rows():
    """Measured once, not when the checkpoint calls again; in this layout they are copied."""
    head, targets = nn.Linear(8, 21).double(), torch.randint(21, (2, 4))
    hidden = torch.randn(8, 4, 2).double().permute(2, 1, 0)

    def gradient(run):
        leaf = hidden.detach().requires_grad_()
        return torch.autograd.grad(run(leaf), leaf)[0]

    def loss(h):
        return chunked_loss(cross_entropy, head, h, targets, workspace=13_212, mode="recompute")

    found = gradient(lambda h: checkpoint(loss, h, use_reentrant=False))
    expected = gradient(lambda h: cross_entropy(head(h).flatten(0, 1), targets.flatten()))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
