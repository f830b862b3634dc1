"""A tensor that head or loss_fn keeps from a chunk never loses its gradient without an error."""

import functools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

from lowtide.ops.chunked_loss import chunked_loss
from tests.ops.chunked_loss.helpers import MODES

N, D, V = 12, 6, 7
KEPT = "has kept a tensor from a chunk.*partial.*sum that loss_fn returns.*has_aux"
summed = partial(F.cross_entropy, reduction="sum")


def make(head):
    torch.manual_seed(0)
    hidden = torch.randn(N, D, dtype=torch.float64, requires_grad=True)
    return head().double(), hidden, torch.randint(V, (N,))


class Merged(nn.Module):
    """Keeps its effective weight, as LoRA heads do for a step."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(D, V, bias=False).requires_grad_(False)
        self.up, self.down = nn.Parameter(torch.randn(V, 2)), nn.Parameter(torch.randn(2, D))

    @functools.cached_property
    def weight(self):
        return self.base.weight + self.up @ self.down

    def forward(self, hidden):
        return F.linear(hidden, self.weight)


class Router(nn.Module):
    """Keeps an auxiliary loss, as mixtures of experts do."""

    def __init__(self):
        super().__init__()
        self.router, self.out = nn.Linear(D, 4), nn.Linear(D, V)

    def forward(self, hidden):
        self.aux = self.router(hidden).softmax(-1).mean(0).square().sum()
        return self.out(hidden)


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).T


@pytest.mark.parametrize("mode", MODES)
def test_merged_weight(mode):
    head, hidden, labels = make(Merged)
    with pytest.raises(ValueError, match=KEPT):
        chunked_loss(summed, head, hidden, labels, chunk_size=5, mode=mode).backward()


@pytest.mark.parametrize("mode", MODES)
def test_merged_weight_is_differentiated_twice(mode):
    head, hidden, labels = make(Merged)
    loss = chunked_loss(summed, head, hidden, labels, chunk_size=20, mode=mode)
    with pytest.raises(ValueError, match=KEPT):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize("mode", MODES)
def test_cached_parametrization_is_used_after_the_call(mode):
    def make_head():
        return parametrize.register_parametrization(nn.Linear(D, D, bias=False), "weight", Symmetric())

    head, hidden, labels = make(make_head)
    with parametrize.cached():
        loss = chunked_loss(summed, head, hidden, labels % D, chunk_size=5, mode=mode)
        total = loss + head(hidden).square().sum()
        with pytest.raises(ValueError, match=KEPT):
            total.backward()


@pytest.mark.parametrize("mode", MODES)
def test_auxiliary_loss_is_added_after_the_call(mode):
    head, hidden, labels = make(Router)
    loss = chunked_loss(summed, head, hidden, labels, mode=mode)
    with pytest.raises(ValueError, match=KEPT):
        (loss + head.aux).backward()


def test_features_are_collected():
    head, hidden, labels = make(lambda: nn.Linear(D, V))
    features = []

    def loss_fn(logits, labels):
        features.append(logits)
        return summed(logits, labels)

    loss = chunked_loss(loss_fn, head, hidden, labels, chunk_size=5, mode="recompute")
    with pytest.raises(ValueError, match=KEPT):
        (loss + torch.cat(features).square().sum()).backward()


@pytest.mark.parametrize("mode", MODES)
def test_kept_tensor_is_only_read(mode):
    head, hidden, labels = make(Router)
    loss = chunked_loss(summed, head, hidden, labels, chunk_size=5, mode=mode)
    logged = head.aux.item() + (loss + head.aux.detach()).item()
    assert logged > 0
    loss.backward()
    dense, again, _ = make(Router)
    summed(dense(again), labels).backward()
    torch.testing.assert_close(hidden.grad, again.grad)
    torch.testing.assert_close(head.out.weight.grad, dense.out.weight.grad)


@pytest.mark.parametrize("mode", MODES)
def test_term_is_kept_within_its_chunk(mode):
    def with_aux(logits, labels, head):
        return summed(logits, labels) + len(logits) * head.aux

    head, hidden, labels = make(Router)
    chunked_loss(partial(with_aux, head=head), head, hidden, labels, chunk_size=20, mode=mode).backward()
    dense, again, _ = make(Router)
    with_aux(dense(again), labels, dense).backward()
    torch.testing.assert_close(hidden.grad, again.grad)
    torch.testing.assert_close(head.router.weight.grad, dense.router.weight.grad)


def test_head_runs_a_backward_pass_of_its_own():
    class Penalised(nn.Linear):
        def forward(self, hidden):
            (0.1 * self.weight.square().sum() * len(hidden)).backward()
            return super().forward(hidden)

    head, hidden, labels = make(lambda: Penalised(D, V))
    chunked_loss(summed, head, hidden, labels, chunk_size=5).backward()
    dense, again, _ = make(lambda: nn.Linear(D, V))
    (summed(dense(again), labels) + 0.1 * N * dense.weight.square().sum()).backward()
    torch.testing.assert_close(head.weight.grad, dense.weight.grad)
