"""What head and loss_fn change as they run, and what a call leaves behind when it fails."""

import threading
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from lowtide.ops.chunked_loss import chunked_loss
from tests.ops.chunked_loss.helpers import MODES, D, V, call, close, cross_entropy, dense, make


@pytest.mark.parametrize("mode", MODES)
def test_buffers_changed(mode):
    head = nn.Sequential(nn.BatchNorm1d(D), nn.Linear(D, V)).double()
    message = "head.0 must not be a BatchNorm1d with statistics of its batch.*eval mode"
    with pytest.raises(ValueError, match=message):
        call(head=head, mode=mode)
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        call(head=head, mode=mode)
    call(head=head.eval(), mode=mode).backward()
    with pytest.raises(ValueError, match="head must not be a BatchNorm1d"):
        call(head=nn.BatchNorm1d(D, track_running_stats=False).double().eval(), mode=mode)

    class Counted(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(D, V).double()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, hidden):
            self.calls = self.calls + 1
            return self.linear(hidden)

    with pytest.raises(ValueError, match=r"must not change buffers, but did: head.calls"):
        call(head=Counted(), mode=mode)


def lowered(logits, labels):
    labels -= 1
    return cross_entropy(logits, labels.clamp(min=0))


def test_rows_changed_before_backward():
    """In place, which dense computation does once."""
    head, hidden, labels = make("linear", ignored=0)
    message = r"must not change.*token_tensors\[0\].*change a copy"
    with pytest.raises(ValueError, match=message):
        chunked_loss(lowered, head, hidden, labels.clone(), chunk_size=5, mode="recompute")
    for mode in MODES:
        with pytest.raises(ValueError, match=message):
            chunked_loss(lowered, head, hidden, labels.clone(), workspace=4000, mode=mode)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(hidden.detach(), hidden.detach())
        with pytest.raises(ValueError, match=message):
            chunked_loss(lowered, head, dual, labels.clone(), chunk_size=5)
    loss = chunked_loss(lowered, head, hidden, labels.clone(), chunk_size=5)
    ours = torch.autograd.grad(loss, hidden, retain_graph=True)
    close(ours, torch.autograd.grad(dense(lowered, head, hidden, labels.clone()), hidden))
    with pytest.raises(ValueError, match=message):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize("mode", MODES)
def test_batch_statistics_of_a_closure(mode):
    teacher = nn.Sequential(nn.Linear(V, V), nn.BatchNorm1d(V)).double().requires_grad_(False)

    def loss_fn(logits, labels):
        with torch.no_grad():
            target = teacher(logits)
        return (logits - target).square().sum()

    before = {name: each.clone() for name, each in teacher.state_dict().items()}
    with pytest.raises(ValueError, match=r"batch normalisation with statistics.*eval mode.*token tensor"):
        call(loss_fn, chunk_size=5, mode=mode)
    torch.testing.assert_close(teacher.state_dict(), before | {"1.num_batches_tracked": torch.tensor(1)})
    teacher.eval()
    call(loss_fn, chunk_size=5, mode=mode).backward()


def test_batch_statistics_of_all_ranks():
    def loss_fn(logits, labels):  # as nn.SyncBatchNorm begins
        return torch.batch_norm_stats(logits, 1e-5)[0].sum()

    with pytest.raises(ValueError, match="batch normalisation with statistics"):
        call(loss_fn)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("what", ["frozen", "partial", "eval", "buffer"])
def test_values_changed_before_backward(mode, what):
    head = nn.Sequential(nn.Dropout(0.5), nn.Linear(D, V).double()).requires_grad_(False)
    head.register_buffer("scale", torch.ones(()))
    _, hidden, labels = make("linear")
    temperature = torch.ones((), dtype=torch.float64)
    own_loss = partial(
        lambda temperature, logits, labels: cross_entropy(logits / temperature, labels), temperature
    )
    loss = chunked_loss(own_loss, head, hidden, labels, chunk_size=5, mode=mode)
    before = torch.autograd.grad(loss, hidden, retain_graph=True)
    if what == "eval":
        head.eval()
    else:
        {"frozen": head[1].weight, "partial": temperature, "buffer": head.scale}[what].mul_(2)
    name = {
        "frozen": "head.1.weight",
        "partial": "loss_fn.0",
        "eval": "head.training",
        "buffer": "head.scale",
    }[what]
    with pytest.raises(ValueError, match=f"must not change.*{name}"):
        torch.autograd.grad(loss, hidden, create_graph=True)
    if mode == "recompute":
        with pytest.raises(ValueError, match=f"must not change.*{name}"):
            torch.autograd.grad(loss, hidden)
    else:
        close(torch.autograd.grad(loss, hidden), before)


@pytest.mark.parametrize("mode", MODES)
def test_threads_share_module(mode):
    """The second would find the first one's copies in the places of the parameters."""
    head, hidden, labels = make("linear")
    raised = []

    def other():
        try:
            chunked_loss(cross_entropy, head, hidden, labels, chunk_size=5)
        except ValueError as error:
            raised.append(str(error))

    def loss_fn(logits, labels):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return cross_entropy(logits, labels)

    weight = head.weight
    chunked_loss(loss_fn, head, hidden, labels, chunk_size=5, mode=mode).backward()
    assert len(raised) == 4 * (1 + (mode == "recompute"))
    assert all("another thread is running chunked_loss with the same module" in each for each in raised)
    assert head.weight is weight
    other()
    assert len(raised) == 4 * (1 + (mode == "recompute"))


def test_failed_call_leaves_module():
    head = nn.Linear(D, V).double()
    before = dict(head.named_parameters())

    def fails(logits, labels):
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        call(fails, head)
    assert all(parameter is before[name] for name, parameter in head.named_parameters())
    assert all(parameter.grad is None for parameter in head.parameters())
