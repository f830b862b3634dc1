"""The autograd contract: one scalar in one graph, whatever is done with it."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.ops.chunked_loss.helpers import (
    CHUNKS,
    HEADS,
    MODES,
    B,
    D,
    T,
    Tied,
    V,
    cast,
    check,
    chunked_loss,
    close,
    cross_entropy,
    dense,
    leaves,
    make,
    per_row,
    roundings_of,
)


def times_in_place(loss, factor):
    loss *= factor
    return loss


def plus(loss, factor):
    return loss + factor * loss.square()


USES = {
    "*": lambda loss, factor: loss * factor,
    "/": lambda loss, factor: loss / factor if factor else loss * 0,
    "*=": times_in_place,
    "+": plus,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("factor", [0.25, 2.0, 1 / 18, -3.0, 0.0])
@pytest.mark.parametrize("use", USES)
def test_loss_used_in_any_way(device, use, factor, mode):
    check(*make(device=device), lambda loss: USES[use](loss, factor), mode=mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("chunk_size", CHUNKS)
def test_heads_and_chunks(device, chunk_size, kind, mode):
    check(*make(kind, device=device), lambda loss: loss / 7, mode=mode, chunk_size=chunk_size)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("chunk_size", CHUNKS)
def test_value_per_row(device, chunk_size, kind):
    upstream = torch.randn(B, T, dtype=torch.float64, device=device)
    options = {"loss_fn": per_row, "mode": "recompute", "chunk_size": chunk_size}
    check(*make(kind, device=device), lambda loss: loss * upstream, **options)
    check(*make(kind, device=device), lambda loss: loss.square().t()[::2], **options)


def test_result_plain_scalar(device):
    head, hidden, labels = make(device=device)
    loss = chunked_loss(cross_entropy, head, hidden, labels)
    assert type(loss) is torch.Tensor
    assert loss.shape == ()
    assert not loss._is_view()
    assert loss.requires_grad


@pytest.mark.parametrize("mode", MODES)
def test_retained_graph_exact(device, mode):
    head, hidden, labels = make(device=device)
    ours = chunked_loss(cross_entropy, head, hidden, labels, chunk_size=5, mode=mode)
    want = dense(cross_entropy, head, hidden, labels)
    kept, copies = [], []
    for last, upstream in ((False, 0.3), (False, -2.0), (False, 0.3), (True, 1.7)):
        upstream = torch.tensor(upstream, dtype=torch.float64, device=device)
        found, expected = (
            torch.autograd.grad(loss, leaves(head, hidden), upstream, retain_graph=not last)
            for loss in (ours, want)
        )
        close(found, expected)
        kept.extend(found)
        copies.extend(each.clone() for each in found)
    assert all(torch.equal(*each) for each in zip(kept, copies)), "a later backward changed earlier gradients"
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(ours, hidden)


@pytest.mark.parametrize("mode", MODES)
def test_gradient_of_one_operand(device, mode):
    head, hidden, labels = make(device=device)
    for leaf in leaves(head, hidden):
        check(head, hidden, labels, of=[leaf], mode=mode)


@pytest.mark.parametrize("mode", MODES)
def test_hooks_once(device, mode):
    head, hidden, labels = make(device=device)
    every = leaves(head, hidden)
    expected = torch.autograd.grad(dense(cross_entropy, head, hidden, labels), every)
    seen, accumulated = {}, []
    for place, leaf in enumerate(every):
        leaf.register_hook(lambda gradient, place=place: seen.setdefault(place, []).append(gradient.clone()))
        leaf.register_post_accumulate_grad_hook(lambda leaf, place=place: accumulated.append(place))
    chunked_loss(cross_entropy, head, hidden, labels, chunk_size=5, mode=mode).backward()
    assert sorted(accumulated) == list(range(len(every)))
    assert all(len(each) == 1 for each in seen.values())
    close([seen[place][0] for place in range(len(every))], expected)
    close([leaf.grad for leaf in every], expected)


def test_hook_changes_gradient(device):
    head, hidden, labels = make(device=device)
    weight = head.linear.weight
    (expected,) = torch.autograd.grad(dense(cross_entropy, head, hidden, labels), [weight])
    weight.register_hook(lambda gradient: -2 * gradient)
    chunked_loss(cross_entropy, head, hidden, labels, chunk_size=5).backward()
    close([weight.grad], [-2 * expected])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("frozen", ["trunk", "head", "some of the head"])
def test_frozen(device, frozen, mode):
    head, hidden, labels = make(device=device)
    if frozen == "trunk":
        hidden = hidden.detach()
    elif frozen == "head":
        head.requires_grad_(False)
    else:
        head.linear.weight.requires_grad_(False)
    check(head, hidden, labels, lambda loss: loss * 3, mode=mode)
    loss = chunked_loss(cross_entropy, head, hidden, labels, mode=mode)
    loss.backward()
    assert all((each.grad is not None) == each.requires_grad for each in (hidden, *head.parameters()))


@pytest.mark.parametrize("mode", MODES)
def test_tied_embedding(device, mode):
    """One parameter in the trunk, the head, and under two names: one gradient, the sum of all."""
    model = Tied().to(device, torch.float64)
    tokens, labels = torch.randint(V, (2, B, T), device=device)
    calls = []
    model.embedding.weight.register_hook(lambda gradient: calls.append(1))
    results = []
    for loss_of in (chunked_loss, dense):
        hidden = model.embedding(tokens).tanh()
        loss = loss_of(cross_entropy, model.linear, hidden, labels, chunk_size=5, mode=mode)
        results.append(torch.autograd.grad(loss / 9, [model.embedding.weight]))
    close(*results)
    assert len(calls) == 2, "once each"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("masked", ["a chunk", "everything"])
def test_no_valid_rows(device, masked, mode):
    head, hidden, labels = make(device=device, ignored=0)
    labels.view(-1)[5:10] = -100
    if masked == "everything":
        labels.fill_(-100)
    check(head, hidden, labels, mode=mode)
    loss = chunked_loss(cross_entropy, head, hidden, labels, chunk_size=5, mode=mode)
    assert loss.requires_grad
    gradients = torch.autograd.grad(loss, leaves(head, hidden))
    if masked == "everything":
        assert all(torch.equal(each, torch.zeros_like(each)) for each in gradients)


@pytest.mark.parametrize("mode", MODES)
def test_loss_without_graph_no_valid_rows(device, mode):
    """A loss function that returns a constant zero, as many do: zeros, or ranks would wait."""

    def loss_fn(logits, labels):
        kept = labels != -100
        return cross_entropy(logits[kept], labels[kept]) if kept.any() else logits.new_zeros(())

    head, hidden, labels = make(device=device, ignored=0)
    labels.view(-1)[:5] = -100
    check(head, hidden, labels, loss_fn=loss_fn, mode=mode)
    labels.fill_(-100)
    loss = chunked_loss(loss_fn, head, hidden, labels, chunk_size=5, mode=mode)
    for gradient in torch.autograd.grad(loss, leaves(head, hidden)):
        assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("mode", MODES)
def test_one_row(device, mode):
    head, hidden, labels = make(device=device, ignored=0)
    check(head, hidden.detach()[:1, :1].requires_grad_(), labels[:1, :1], lambda loss: loss * 2, mode=mode)


@pytest.mark.parametrize("mode", MODES)
def test_no_rows(device, mode):
    head, hidden, labels = make(device=device)
    empty = hidden.detach()[:, :0].requires_grad_()
    loss = chunked_loss(cross_entropy, head, empty, labels[:, :0], mode=mode)
    assert loss == 0
    for gradient in torch.autograd.grad(loss, leaves(head, empty)):
        assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("mode", MODES)
def test_gradients_accumulate(device, mode):
    head, hidden, labels = make(device=device)
    expected = torch.autograd.grad(dense(cross_entropy, head, hidden, labels) / 4, leaves(head, hidden))
    for micro, micro_labels in zip(hidden.split(1), labels.split(1)):
        loss = chunked_loss(cross_entropy, head, micro, micro_labels, chunk_size=4, mode=mode)
        loss /= 4
        loss.backward()
    close([leaf.grad for leaf in leaves(head, hidden)], expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", ["shifted", "transposed", "expanded", "four dimensions", "strided"])
def test_strides(device, layout, mode):
    base = torch.randn(3, 4, T, D, dtype=torch.float64, device=device, requires_grad=True)
    view = {
        "shifted": lambda base: base[0][:, :-1],
        "transposed": lambda base: base[0].transpose(0, 1),
        "expanded": lambda base: base[:1, 0].expand(4, T, D),
        "four dimensions": lambda base: base[:, ::2],
        "strided": lambda base: base.transpose(-1, 0)[..., :2].transpose(-1, -2)[..., :1].expand(D, 4, 2, D),
    }[layout]
    head = HEADS["norm"]().to(device, torch.float64)
    labels = torch.randint(V, view(base).shape[:-1], device=device)
    if layout == "four dimensions":
        labels = labels.transpose(0, 1).contiguous().transpose(0, 1)

    def run(loss_of, head, base):
        loss = loss_of(cross_entropy, head, view(base), labels, chunk_size=5, mode=mode)
        return [loss.detach(), *torch.autograd.grad(loss, [base, *head.parameters()])]

    exact = run(dense, head, base)
    roundings = roundings_of(run(dense, *cast(head, base, torch.float32)), exact)
    close(run(chunked_loss, head, base), exact, roundings=roundings)


@pytest.mark.parametrize("mode", MODES)
def test_no_grad(device, mode):
    head, hidden, labels = make(device=device)
    expected = dense(cross_entropy, head, hidden, labels).detach()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            loss = chunked_loss(cross_entropy, head, hidden * 1, labels, chunk_size=5, mode=mode)
        assert not loss.requires_grad
        close([loss], [expected])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["norm", "adapted", "two layers"])
def test_double_backward(device, kind, mode):
    head, hidden, labels = make(kind, device=device, dtype=torch.float32)
    exact = cast(head, hidden)

    def penalty(loss_of, head, hidden, order, shift=0):
        moved, target = (each.roll(shift, 1) if shift else each for each in (hidden, labels))
        total = loss_of(cross_entropy, head, moved, target, chunk_size=5, mode=mode).square() / 90
        for _ in range(order):
            gradients = torch.autograd.grad(total, leaves(head, hidden), create_graph=True)
            total = sum((each * each.cos()).sum() for each in gradients)
        return torch.autograd.grad(total, leaves(head, hidden))

    for order in (1, 2):
        ours, truth = (penalty(loss_of, *exact, order) for loss_of in (chunked_loss, dense))
        # Off by 4 roundings or by 100, by luck, after so many derivatives: the rows in several
        # orders.
        several = (penalty(dense, head, hidden, order, shift) for shift in range(8))
        close(ours, truth, roundings=max(roundings_of(eager, truth) for eager in several))


def test_double_backward_value_per_row(device):
    head, hidden, labels = make(device=device)
    every = leaves(head, hidden)
    upstream = torch.randn(B, T, dtype=torch.float64, device=device, requires_grad=True)
    results = []
    for loss_of in (chunked_loss, dense):
        rows = loss_of(per_row, head, hidden, labels, chunk_size=5, mode="recompute")
        first = torch.autograd.grad(rows, every, upstream, create_graph=True)
        results.append(torch.autograd.grad(sum(each.square().sum() for each in first), [*every, upstream]))
    close(*results)


def test_gradgradcheck():
    head = nn.Linear(3, 4).double()
    hidden = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(4, (5,))
    for mode in MODES:

        def loss(hidden, weight, mode=mode):
            linear = functools.partial(F.linear, weight=weight)
            return chunked_loss(cross_entropy, linear, hidden, labels, chunk_size=2, mode=mode)

        assert torch.autograd.gradcheck(loss, (hidden, head.weight))
        assert torch.autograd.gradgradcheck(loss, (hidden, head.weight))


def test_batched_upstream(device):
    head, hidden, labels = make(device=device)
    loss = chunked_loss(cross_entropy, head, hidden, labels, chunk_size=5)
    upstream = torch.tensor([1.0, -2.0], dtype=torch.float64, device=device)
    batched = torch.autograd.grad(
        loss, leaves(head, hidden), upstream, is_grads_batched=True, retain_graph=True
    )
    for place, each in enumerate(upstream):
        close(
            [g[place] for g in batched],
            torch.autograd.grad(loss, leaves(head, hidden), each, retain_graph=True),
        )
    again = chunked_loss(cross_entropy, head, hidden, labels, chunk_size=5, mode="recompute")
    with pytest.raises(ValueError, match="one upstream gradient at a time"):
        torch.autograd.grad(again, hidden, upstream, is_grads_batched=True)


@pytest.mark.parametrize("mode", MODES)
def test_same_call_same_bits(device, mode):
    head, hidden, labels = make(device=device, dtype=torch.float32)
    first, second = (
        [
            loss.detach(),
            *torch.autograd.grad(loss * 0.3, leaves(head, hidden)),
        ]
        for loss in (
            chunked_loss(cross_entropy, head, hidden, labels, chunk_size=5, mode=mode) for _ in range(2)
        )
    )
    assert all(torch.equal(*each) for each in zip(first, second))
