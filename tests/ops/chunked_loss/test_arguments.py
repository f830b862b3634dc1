"""What may be given: decorators, heads that are no modules, what is learned in the loss, aux."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

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
    gradients,
    leaves,
    make,
    per_row,
)


def test_decorators(device):
    head, hidden, labels = make(device=device)
    expected = chunked_loss(cross_entropy, head, hidden, labels, chunk_size=5)

    @chunked_loss(chunk_size=5)
    def with_options(logits, labels):
        "What it says."
        return cross_entropy(logits, labels)

    @chunked_loss
    def without(logits, labels):
        return cross_entropy(logits, labels)

    assert with_options.__doc__ == "What it says."
    close([with_options(head, hidden, labels), without(head, hidden, labels)], [expected] * 2)


@pytest.mark.parametrize("mode", MODES)
def test_heads_without_module(device, mode):
    """A bound method, a partial with tensors, a partial with a module: all parameters are seen."""
    head, hidden, labels = make("linear", device=device)
    expected = gradients(dense, head, hidden, labels)

    def capped(module, hidden):
        return module(hidden)

    for form in (
        head.forward,
        partial(F.linear, weight=head.weight, bias=head.bias),
        partial(capped, head),
        partial(capped, head.forward),
    ):
        loss = chunked_loss(cross_entropy, form, hidden, labels, chunk_size=5, mode=mode)
        close(torch.autograd.grad(loss / 18, leaves(head, hidden)), expected)


@pytest.mark.parametrize("mode", MODES)
def test_loss_with_parameters(device, mode):
    head, hidden, labels = make(device=device)
    temperature = torch.tensor(1.7, dtype=torch.float64, device=device, requires_grad=True)
    weight = torch.rand(B, T, dtype=torch.float64, device=device, requires_grad=True)
    teacher = torch.randn(B, T, V, dtype=torch.float64, device=device, requires_grad=True)

    def loss_fn(logits, labels, weight, teacher, temperature, factor, nothing):
        assert nothing is None
        student = F.log_softmax(logits / temperature, -1)
        distilled = F.kl_div(student, teacher.log_softmax(-1), reduction="none", log_target=True).sum(-1)
        return (weight * (per_row(logits, labels) + factor * distilled)).sum()

    every = [*leaves(head, hidden), weight, teacher, temperature]
    results = []
    for loss_of in (chunked_loss, dense):
        arguments = (labels, weight, teacher, temperature, 0.3, None)
        loss = loss_of(loss_fn, head, hidden, *arguments, chunk_size=5, mode=mode)
        results.append([loss.detach(), *torch.autograd.grad(loss * 2, every)])
    close(*results)

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.temperature = nn.Parameter(temperature.detach())

        def forward(self, logits, *rest):
            return loss_fn(logits, *rest, self.temperature, 0.3, None)

    for own in (Module(), partial(loss_fn, temperature=temperature, factor=0.3, nothing=None)):
        learned = next(own.parameters()) if isinstance(own, nn.Module) else temperature
        loss = chunked_loss(own, head, hidden, labels, weight, teacher, chunk_size=5, mode=mode)
        close(torch.autograd.grad(loss * 2, [learned]), results[1][-1:])


@pytest.mark.parametrize("mode", MODES)
def test_several_hidden_states(device, mode):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(D, V), nn.Linear(3, V)

        def forward(self, first, second):
            return self.first(first) + self.second(second)

    head = Two().to(device, torch.float64)
    _, first, labels = make(device=device)
    second = torch.randn(B, T, 3, dtype=torch.float64, device=device, requires_grad=True)
    check(head, (first, second), labels, lambda loss: loss * -0.3, mode=mode)
    check(head, (first, second.detach()), labels, mode=mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_aux_summed_and_detached(device, dtype, mode):
    head, hidden, labels = make("linear", device=device, dtype=dtype, ignored=0)

    def loss_fn(logits, labels):
        aux = {
            "right": logits.argmax(-1).eq(labels).sum(),
            "logits": logits.float().sum(0),
            "any": labels.ne(-100).any(),
            "rows": len(labels),
        }
        return cross_entropy(logits, labels), aux

    loss, aux = chunked_loss(loss_fn, head, hidden, labels, chunk_size=5, mode=mode, has_aux=True)
    _, expected = dense(loss_fn, head, hidden, labels)
    assert aux["rows"] == B * T
    assert torch.equal(aux["right"], expected["right"])
    assert not aux["logits"].requires_grad
    close([aux["logits"]], [expected["logits"]], torch.float32)
    assert aux["any"] == 4, "a sum over chunks"
    loss.backward()
    with torch.no_grad():
        _, again = chunked_loss(loss_fn, head, hidden, labels, chunk_size=5, mode=mode, has_aux=True)
    assert torch.equal(again["right"], aux["right"])


def test_aux_integers_and_mixed_types(device):
    head, hidden, labels = make("linear", device=device)

    def loss_fn(logits, labels):
        mixed = torch.full((), 0.25) if len(labels) == 5 else 2
        small = {
            dtype: torch.full((2,), 100, dtype=dtype) for dtype in (torch.uint8, torch.int8, torch.int16)
        }
        aux = {"first": mixed, "last": 1 if len(labels) == 5 else torch.tensor([True]).sum()}
        return cross_entropy(logits, labels), aux | {str(dtype): each for dtype, each in small.items()}

    _, aux = chunked_loss(loss_fn, head, hidden, labels, chunk_size=5, has_aux=True)
    assert float(aux.pop("first")) == 2.75
    assert int(aux.pop("last")) == 4
    assert [each.tolist() for each in aux.values()] == [[400, 400]] * 3


@pytest.mark.parametrize("mode", MODES)
def test_inference_tensors(device, mode):
    """A teacher's hidden states; autograd would not keep them."""
    head, hidden, _ = make("linear", device=device)
    teacher = nn.Linear(D, V).to(device, torch.float64).requires_grad_(False)
    with torch.inference_mode():
        states = torch.randn(B, T, D, dtype=torch.float64, device=device)

    def distilled(logits, states):
        with torch.no_grad():
            wanted = teacher(states).softmax(-1)
        return -(wanted * logits.log_softmax(-1)).sum()

    results = []
    for loss_of, own in ((chunked_loss, states), (dense, states.clone())):
        loss = loss_of(
            distilled, head, hidden, own, **({"chunk_size": 5, "mode": mode} if own is states else {})
        )
        results.append([loss.detach(), *torch.autograd.grad(loss, leaves(head, hidden))])
    close(*results)


@pytest.mark.parametrize("mode", MODES)
def test_rows_no_grad(device, mode):
    head, hidden, labels = make("linear", device=device)
    weight, seen = torch.rand(B, T, dtype=torch.float64, device=device), set()

    def weighted(logits, labels, weight):
        seen.add((logits.requires_grad, weight.requires_grad))
        return (per_row(logits, labels) * weight).sum()

    chunked_loss(weighted, head, hidden, labels, weight, chunk_size=5, mode=mode).backward()
    assert seen == {(True, False)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", ["module", "bound method"])
def test_workspace_measured_once(device, mode, form):
    module, hidden, labels = make("linear", device=device)
    sizes = []

    def loss_fn(logits, labels):
        sizes.append(len(logits))
        return cross_entropy(logits, labels)

    def step(workspace):
        sizes.clear()
        head = module if form == "module" else module.forward
        loss = chunked_loss(loss_fn, head, hidden, labels, workspace=workspace, mode=mode)
        return [loss.detach(), *torch.autograd.grad(loss, leaves(module, hidden))]

    expected = dense(cross_entropy, module, hidden, labels)
    expected = [expected.detach(), *torch.autograd.grad(expected, leaves(module, hidden))]
    times = 1 + (mode == "recompute")
    for workspace in (2**30, 3000):
        step(workspace)
        close(step(workspace), expected)
        assert len(sizes) % times == 0
        own = sizes[: len(sizes) // times]
        assert sum(own) == B * T, "measured anew"
        assert own == [B * T] if workspace == 2**30 else 1 < own[0] < B * T


def test_workspace_value_per_row(device):
    head, hidden, labels = make("linear", device=device)
    losses = chunked_loss(per_row, head, hidden, labels, workspace=3000, mode="recompute")
    expected = dense(per_row, head, hidden, labels)
    results = [
        [each.detach(), *torch.autograd.grad(each.square().sum(), leaves(head, hidden))]
        for each in (losses, expected)
    ]
    close(*results)


@pytest.mark.parametrize("mode", ["gradient_in_forward", "recompute"])
def test_normalizer_divides_the_sum(mode):
    head, hidden, labels = make(dtype=torch.float64)
    leaves = (hidden, *head.parameters())
    whole = chunked_loss(cross_entropy, head, hidden, labels, chunk_size=4, mode=mode) / 7
    expected = torch.autograd.grad(whole, leaves)
    for count in (7, 7.0, torch.tensor(7)):
        loss = chunked_loss(
            cross_entropy, head, hidden, labels, chunk_size=4, mode=mode, normalizer=count, has_aux=False
        )
        assert torch.equal(loss, whole)
        for one, other in zip(torch.autograd.grad(loss, leaves), expected):
            assert torch.equal(one, other)


def test_normalizer_leaves_aux_and_refuses_rows():
    head, hidden, labels = make(dtype=torch.float64)

    def with_aux(logits, labels):
        return cross_entropy(logits, labels), {"rows": len(labels)}

    _, aux = chunked_loss(with_aux, head, hidden, labels, has_aux=True, normalizer=3)
    assert aux["rows"] == labels.numel()
    for wrong, message in ((0, "above 0"), (torch.ones(2), "0-d tensor"), ("3", "must be a float")):
        with pytest.raises((ValueError, TypeError), match=message):
            chunked_loss(cross_entropy, head, hidden, labels, normalizer=wrong)
    with pytest.raises(ValueError, match="loss_fn returned a value for each row"):
        chunked_loss(per_row, head, hidden, labels, mode="recompute", normalizer=3)
