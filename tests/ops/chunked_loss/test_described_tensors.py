"""Tensors without data: fake ones, as memory trackers use them, and the meta device."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.ops.chunked_loss.helpers import MODES, B, D, T, V, chunked_loss, cross_entropy, per_row


def made(**options):
    hidden = torch.randn(B, T, D, requires_grad=True, **options)
    labels = torch.zeros(B, T, dtype=torch.long, device=options.get("device"))
    return nn.Linear(D, V, **options), hidden, labels


def check_gradients(loss, head, hidden):
    loss.sum().backward()
    for each in (hidden, *head.parameters()):
        assert (each.grad.shape, each.grad.dtype, each.grad.device) == (each.shape, each.dtype, each.device)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("size", [{"chunk_size": 5}, {"workspace": 10_000}], ids=str)
def test_fake_tensors(mode, dtype, size):
    with FakeTensorMode():
        head, hidden, labels = made(dtype=dtype)
        loss = chunked_loss(cross_entropy, head, hidden, labels, mode=mode, **size)
        assert loss.shape == ()
        assert loss.dtype == torch.float32
        check_gradients(loss, head, hidden)


def test_fake_values_of_rows():
    with FakeTensorMode():
        head, hidden, labels = made()
        losses = chunked_loss(per_row, head, hidden, labels, chunk_size=5, mode="recompute")
        assert losses.shape == (B, T)
        check_gradients(losses, head, hidden)


@pytest.mark.parametrize("mode", MODES)
def test_meta_device(mode):
    head, hidden, labels = made(device="meta")
    loss = chunked_loss(cross_entropy, head, hidden, labels, chunk_size=5, mode=mode)
    assert loss.is_meta
    assert loss.shape == ()
    check_gradients(loss, head, hidden)
