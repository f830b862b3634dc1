"""Sparse gradients: those of nn.Embedding(sparse=True), as a sampled softmax takes it."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.ops.chunked_loss.helpers import MODES, D, V, chunked_loss, close, relative

N, K = 11, 3  # rows, classes sampled for each


class Sampled(nn.Module):
    def __init__(self):
        super().__init__()
        self.classes = nn.Embedding(V, D, sparse=True)

    def forward(self, hidden, sampled):
        return torch.einsum("nd,nkd->nk", hidden, self.classes(sampled))


class Tied(Sampled):
    """The table is a matrix as well: its gradient has a sparse and a dense term, chunk by chunk."""

    def __init__(self, dense_first):
        super().__init__()
        self.dense_first = dense_first

    def forward(self, hidden, sampled):
        if bool(sampled[0, 0] == 0) is self.dense_first:
            return F.linear(hidden, self.classes.weight)
        return super().forward(hidden, sampled)


def first_class(logits):
    return F.cross_entropy(logits.double(), logits.new_zeros(len(logits), dtype=torch.int64), reduction="sum")


def make(head, device, dtype):
    head = head.to(device, dtype)
    hidden = torch.randn(N, D, dtype=dtype, device=device, requires_grad=True)
    return head, hidden, torch.randint(5, (N, K), device=device)


def dense(head, hidden, sampled, rows):
    return sum(first_class(head(*each)) for each in zip(hidden.split(rows), sampled.split(rows)))


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("mode", MODES)
def test_sparse_gradient(device, mode, scale):
    head, hidden, sampled = make(Sampled(), device, torch.float64)
    parameters = [hidden, head.classes.weight]
    loss = chunked_loss(first_class, head, (hidden, sampled), chunk_size=4, mode=mode)
    want = torch.autograd.grad(scale * dense(head, hidden, sampled, 4), parameters)
    for _ in range(2):
        found = torch.autograd.grad(scale * loss, parameters, retain_graph=True)
        assert found[1].is_sparse
        close([each.to_dense() for each in found], [each.to_dense() for each in want])
    (scale * loss).backward()
    close([head.classes.weight.grad.to_dense()], [want[1].to_dense()])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sparse_gradient_is_rounded_once(device, dtype, mode):
    head, hidden, sampled = make(Sampled(), device, dtype)
    wide, wide_hidden = copy.deepcopy(head).double(), hidden.detach().double()
    dense(wide, wide_hidden, sampled, 4).backward()
    (1024 * chunked_loss(first_class, head, (hidden, sampled), chunk_size=4, mode=mode)).backward()
    found = head.classes.weight.grad
    assert found.is_sparse
    assert found.dtype == dtype
    assert (
        relative(found.to_dense().double() / 1024, wide.classes.weight.grad.to_dense())
        < 2 * torch.finfo(dtype).eps
    )


@pytest.mark.parametrize("dense_first", [True, False])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dense_and_sparse_terms(device, dtype, mode, dense_first):
    head, hidden, sampled = make(Tied(dense_first), device, dtype)
    sampled[:, 0] = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0], device=device)
    wide, wide_hidden = copy.deepcopy(head).double(), hidden.detach().double()
    dense(wide, wide_hidden, sampled, 4).backward()
    chunked_loss(first_class, head, (hidden, sampled), chunk_size=4, mode=mode).backward()
    tolerance = 1e-12 if dtype == torch.float64 else 4 * torch.finfo(dtype).eps
    assert relative(head.classes.weight.grad.double(), wide.classes.weight.grad.to_dense()) < tolerance


def test_workspace(device):
    head, hidden, sampled = make(Sampled(), device, torch.float64)
    loss = partial(chunked_loss, first_class, head, (hidden, sampled))
    loss(workspace=5000).backward()
    close(
        [head.classes.weight.grad.to_dense()],
        [torch.autograd.grad(loss(), [head.classes.weight])[0].to_dense()],
    )
