"""Beside the rest of torch: autocast, loss scaling, dropout, checkpointing, compilation."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.chunked_loss.helpers import (
    MODES,
    B,
    D,
    T,
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
)
from tests.helpers import no_synchronisation


def relative(found, truth):
    return ((found.double() - truth).norm() / truth.norm().clamp_min(1e-300)).item()


def gradients(loss_of, head, hidden, labels, use=lambda loss: loss / 18, **options):
    loss = loss_of(cross_entropy, head, hidden, labels, **options)
    return torch.autograd.grad(use(loss), leaves(head, hidden))


# Precision.


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["linear", "norm", "adapted"])
def test_no_less_exact_than_dense(device, kind, dtype, mode):
    head, hidden, labels = make(kind, device=device, dtype=dtype, tokens=150)
    truth = gradients(dense, *cast(head, hidden), labels)
    eager = gradients(dense, head, hidden, labels)
    ours = gradients(chunked_loss, head, hidden, labels, chunk_size=32, mode=mode)
    assert all(found.dtype == dtype for found in ours)
    for part in (slice(0, 1), slice(1, None)):  # one number may be right by luck: the head's gradients as one
        found, plain, want = (
            torch.cat([each.flatten() for each in result[part]]) for result in (ours, eager, truth)
        )
        assert relative(found, want) <= 2 * relative(plain, want)


@pytest.mark.parametrize("mode", MODES)
def test_many_chunks_of_bfloat16_add_up_in_float32(device, mode):
    """256 chunks: a sum in bfloat16 would be off by some per cent."""
    head = nn.Linear(D, V, bias=False).to(device, torch.bfloat16)
    hidden = torch.randn(1, 1024, D, device=device).to(torch.bfloat16).requires_grad_()
    labels = torch.randint(V, (1, 1024), device=device)
    exact_head, exact_hidden = copy.deepcopy(head).double(), hidden.detach().double().requires_grad_()
    truth = gradients(dense, exact_head, exact_hidden, labels)
    eager = gradients(dense, head, hidden, labels)
    ours = gradients(chunked_loss, head, hidden, labels, chunk_size=4, mode=mode)
    for found, plain, want in zip(ours, eager, truth):
        assert relative(found, want) <= 2 * relative(plain, want)


def test_the_loss_of_half_precision_is_summed_in_float32(device):
    head, hidden, labels = make("linear", device=device, dtype=torch.bfloat16)

    def rounded(logits, labels):
        return cross_entropy(logits, labels).bfloat16()

    assert chunked_loss(rounded, head, hidden, labels, chunk_size=2).dtype == torch.float32


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_float16_gradients_do_not_underflow(device, mode, autocast):
    """A loss divided by many tokens and multiplied by the scaler: at scale 1 most of it would be 0."""
    dtype = torch.float32 if autocast else torch.float16
    head, hidden, labels = make("linear", device=device, dtype=dtype, ignored=0)
    labels.view(-1)[:5] = -100  # the first chunk says nothing about the size of the others'
    with torch.no_grad():
        hidden *= 1e-3
        head.weight *= 0.1

    def loss_fn(logits, labels):
        return cross_entropy(logits, labels) * 1e-6

    exact_head, exact_hidden = copy.deepcopy(head).double(), hidden.detach().double().requires_grad_()
    truth = torch.autograd.grad(
        dense(loss_fn, exact_head, exact_hidden, labels), leaves(exact_head, exact_hidden)
    )
    scale = 2.0**24
    results = []
    for loss_of in (chunked_loss, dense):
        with torch.autocast(device, torch.float16, enabled=autocast):
            loss = loss_of(loss_fn, head, hidden, labels, chunk_size=5, mode=mode)
        results.append(torch.autograd.grad(loss * scale, leaves(head, hidden)))
    for ours, eager, want in zip(*results, truth):
        assert relative(ours.double() / scale, want) <= 2 * relative(eager.double() / scale, want) + 1e-3
        assert relative(ours.double() / scale, want) < 0.01


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("largest", [1e4, 1e7])
def test_float16_gradients_do_not_overflow(device, largest, mode):
    """Rows of very different weights, the largest beyond float16 until the loss is divided."""
    head, hidden, labels = make("linear", device=device, dtype=torch.float16, ignored=0)
    sizes = torch.logspace(-8, 0, B * T, device=device).view(B, T) * largest

    def weighted(logits, labels, weight):
        return (per_row(logits, labels) * weight).sum()

    truth, eager, ours = (
        torch.autograd.grad(
            loss_of(weighted, own, h, labels, sizes, chunk_size=5, mode=mode) / (largest / 64), leaves(own, h)
        )
        for loss_of, (own, h) in (
            (dense, cast(head, hidden)),
            (dense, (head, hidden)),
            (chunked_loss, (head, hidden)),
        )
    )
    for found, plain, want in zip(ours, eager, truth):
        assert relative(found, want) <= 2 * relative(plain, want) + torch.finfo(torch.float16).eps


@pytest.mark.parametrize("mode", MODES)
def test_a_step_with_a_scaler(device, mode):
    head, hidden, labels = make("linear", device=device, dtype=torch.float32)
    expected = gradients(dense, head, hidden, labels)
    optimizer = torch.optim.SGD([*head.parameters(), hidden], lr=0)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**16)
    with torch.autocast(device, torch.float16):
        loss = chunked_loss(cross_entropy, head, hidden, labels, chunk_size=5, mode=mode) / 18
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    for leaf, want in zip(leaves(head, hidden), expected):
        assert relative(leaf.grad, want.double()) < 0.01


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", ["outside", "inside", "switched off inside"])
def test_autocast(device, where, mode):
    """Whatever surrounds the backward pass; what is switched off inside stays exact."""
    head, hidden, labels = make("two layers", device=device, dtype=torch.float32)

    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = head

        def forward(self, hidden):
            with torch.autocast(device, torch.bfloat16, enabled=where == "inside"):
                return self.head(hidden.float())

    outside, module = where != "inside", head if where == "outside" else Cast()
    dtypes = []

    def loss_fn(logits, labels):
        dtypes.append(logits.dtype)
        return cross_entropy(logits, labels)

    def run(loss_of, backward_inside):
        with torch.autocast(device, torch.bfloat16, enabled=outside):
            loss = loss_of(loss_fn, module, hidden, labels, chunk_size=5, mode=mode)
            if backward_inside:
                return torch.autograd.grad(loss / 18, leaves(head, hidden))
        return torch.autograd.grad(loss / 18, leaves(head, hidden))

    want = run(dense, False)
    for backward_inside in (False, True):
        ours = run(chunked_loss, backward_inside)
        if where == "switched off inside":
            close(ours, want, torch.float32)
        for found, expected in zip(ours, want):
            assert found.dtype == torch.float32
            assert relative(found, expected.double()) < 0.02
    assert set(dtypes) == {torch.float32 if where == "switched off inside" else torch.bfloat16}


# Randomness.


class Dropped(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.linear = nn.Linear(D, V).to(device, torch.float64)
        self.drop = nn.Dropout(0.5)

    def forward(self, hidden):
        return self.linear(self.drop(hidden))


@pytest.mark.parametrize("mode", MODES)
def test_the_mask_of_the_forward_pass(device, mode):
    """The loss is linear in the weight where it is a sum of logits: its gradient has the mask in it."""
    head = Dropped(device)
    hidden = torch.randn(B, T, D, dtype=torch.float64, device=device, requires_grad=True)
    loss = chunked_loss(torch.sum, head, hidden, chunk_size=5, mode=mode)
    before = torch.get_rng_state(), torch.cuda.get_rng_state() if device == "cuda" else None
    for _ in range(2):
        grad_hidden, grad_weight = torch.autograd.grad(loss, [hidden, head.linear.weight], retain_graph=True)
        mask = grad_hidden / head.linear.weight.sum(0)
        close([mask.abs().sum()], [2.0 * mask.detach().gt(0.5).sum().double()])
        close([grad_weight[0]], [(mask * hidden).sum((0, 1)).detach()])
        close([loss.detach()], [((mask * hidden) @ head.linear.weight.t() + head.linear.bias).sum().detach()])
    create_graph = torch.autograd.grad(loss, [hidden], create_graph=True)
    close([create_graph[0].detach()], [grad_hidden])
    assert torch.equal(before[0], torch.get_rng_state()), "the generator went on from where it was"
    if device == "cuda":
        assert torch.equal(before[1], torch.cuda.get_rng_state())
    torch.autograd.grad(loss, [hidden])


def test_another_mask_in_another_chunk(device):
    head = Dropped(device)
    hidden = torch.ones(2, 64, D, dtype=torch.float64, device=device, requires_grad=True)
    loss = chunked_loss(torch.sum, head, hidden, chunk_size=64)
    (gradient,) = torch.autograd.grad(loss, hidden)
    assert not torch.equal(gradient[0], gradient[1])


# Checkpointing and hooks on saved tensors.


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_around_it(device, use_reentrant, mode):
    head, hidden, labels = make(device=device)
    trunk = nn.Linear(D, D).to(device, torch.float64)

    def run(hidden, loss_of):
        return loss_of(cross_entropy, head, trunk(hidden).tanh(), labels, chunk_size=5, mode=mode)

    expected = torch.autograd.grad(run(hidden, dense) * 3, [*leaves(head, hidden), *trunk.parameters()])
    loss = checkpoint(run, hidden, chunked_loss, use_reentrant=use_reentrant) * 3
    loss.backward()
    close([each.grad for each in (*leaves(head, hidden), *trunk.parameters())], expected)


@pytest.mark.parametrize("mode", MODES)
def test_checkpointing_inside_the_head(device, mode):
    head, hidden, labels = make("two layers", device=device)

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.drop = head, nn.Dropout(0.0)

        def forward(self, hidden):
            return checkpoint(self.head, hidden, use_reentrant=False)

    check(Checkpointed(), hidden, labels, lambda loss: loss / 3, mode=mode)


@pytest.mark.parametrize("mode", MODES)
def test_saved_tensors_go_through_hooks_once(device, mode):
    """Offloading for what waits for backward; nothing of a chunk is packed."""
    head, hidden, labels = make(device=device)
    expected = gradients(dense, head, hidden, labels)
    packed = []

    def pack(tensor):
        packed.append(tensor.shape)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = chunked_loss(cross_entropy, head, hidden, labels, chunk_size=5, mode=mode)
    assert not any(shape[-1:] == (V,) and shape[0] == 5 for shape in packed if shape)
    close(torch.autograd.grad(loss / 18, leaves(head, hidden)), expected)


def test_an_in_place_change_of_what_a_chunk_saved_is_found(device):
    class Wrong(nn.Linear):
        def forward(self, hidden):
            squashed = super().forward(hidden).tanh()
            squashed.detach().mul_(2)
            return squashed

    _, hidden, labels = make(device=device, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        chunked_loss(cross_entropy, Wrong(D, V).to(device), hidden, labels)


# Compilation.


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("mode", MODES)
def test_a_compiled_step_runs_it_in_between(device, mode):
    torch.compiler.reset()
    head, hidden, labels = make(device=device)
    trunk = nn.Linear(D, D).to(device, torch.float64)

    def step(hidden, labels, loss_of):
        loss = loss_of(cross_entropy, head, trunk(hidden).tanh(), labels, chunk_size=5, mode=mode)
        loss = loss / labels.ne(-100).sum()
        loss *= 0.5
        return loss

    every = [*leaves(head, hidden), *trunk.parameters()]
    compiled = torch.compile(step, backend="aot_eager")
    close(
        torch.autograd.grad(compiled(hidden, labels, chunked_loss), every),
        torch.autograd.grad(step(hidden, labels, dense), every),
    )
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("mode", MODES)
def test_a_compiled_head(device, mode):
    torch.compiler.reset()
    head, hidden, labels = make(device=device)
    compiled = torch.compile(head, backend="aot_eager")
    results = [gradients(chunked_loss, compiled, hidden, labels, chunk_size=6, mode=mode)]
    results.append(gradients(dense, head, hidden, labels))
    close(*([result[0], *sorted(result[1:], key=lambda each: each.shape)] for result in results))
    torch.compiler.reset()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nothing_waits_for_the_device(device, dtype, mode):
    head, hidden, labels = make("two layers", device=device, dtype=dtype)
    hidden = hidden.detach()[:, :-1].requires_grad_()
    upstream = torch.ones((), device=device)

    def step():
        loss = chunked_loss(cross_entropy, head, hidden, labels[:, :-1], chunk_size=5, mode=mode)
        torch.autograd.grad(loss, leaves(head, hidden), upstream)

    step()  # kernels are compiled, libraries loaded
    with no_synchronisation(device):
        step()


# What may be given.


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
def test_heads_that_are_no_modules(device, mode):
    """A bound method, a partial with tensors, a partial with a module: all of their parameters are seen."""
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
def test_what_is_learned_may_be_in_the_loss(device, mode):
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
def test_aux_is_added_up_and_detached(device, dtype, mode):
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
