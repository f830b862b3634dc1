"""Operands of other dtypes than the head's: no further from float64 than the model's own code, by
torch's own promotion, and never a division by what may be 0."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from tests.deferred.helpers import V, check, differentiated, make, norm, plain_and_deferred, within_eager

HALVES = [torch.bfloat16, torch.float16]


class AdaptedHead(nn.Module):
    """As PEFT keeps it: a head of half precision, and an adapter of float32."""

    def __init__(self, head, rank=4, dtype=torch.float32, scale=2.0):
        super().__init__()
        self.base, self.weight, self.scale = head, head.weight, scale
        self.down = nn.Linear(head.in_features, rank, bias=False, dtype=dtype)
        self.up = nn.Linear(rank, head.out_features, bias=False, dtype=dtype)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x.to(self.down.weight.dtype))) * self.scale


@pytest.mark.parametrize("adapter", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("half", HALVES, ids=str)
def test_adapter_of_higher_precision(half, adapter):
    model, tokens, targets = make(dtype=half)
    model.lm_head = AdaptedHead(model.lm_head, dtype=adapter)

    def use(model):
        z = model(tokens)[0]
        z = z.to(adapter) if isinstance(z, torch.Tensor) else z
        return F.cross_entropy(z.view(-1, V), targets.view(-1), ignore_index=-1)

    expected = differentiated(model, use(model))
    exact = differentiated(wide := copy.deepcopy(model).double(), use(wide))
    with lowtide.defer_logits(model, head=model.lm_head) as deferral:
        found = differentiated(model, use(model))
    assert (deferral.fused, deferral.materialized) == (1, {})
    assert [each.dtype for each in found] == [each.dtype for each in expected]
    for ours, eager, want in zip(found, expected, exact):
        # The hidden states' error is the head's, that of the adapter is its own.
        within_eager(ours, eager, want, ours.dtype)


FAR = {
    "bfloat16": (torch.bfloat16, 300.0),
    "float16": (torch.float16, 300.0),
    "float16, beyond its range": (torch.float16, 1e5),
}


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("name", FAR)
def test_vector_of_higher_precision(name, learned):
    half, far = FAR[name]
    model, tokens, targets = make(dtype=half, bias=True)
    model.prior = nn.Parameter(torch.linspace(-far, far + 1.3, V), requires_grad=learned)

    def use(model):
        z = model(tokens)[0]
        z = z.to(torch.promote_types(z.dtype, torch.float32)) + model.prior
        return F.cross_entropy(z.view(-1, V), targets.view(-1), ignore_index=-1)

    exact = differentiated(wide := copy.deepcopy(model).double(), use(wide))
    expected, found, deferral = plain_and_deferred(model, use)
    assert (deferral.fused, deferral.materialized) == (1, {})
    for ours, eager, want in zip(found, expected, exact):
        assert ours.isfinite().all()
        within_eager(ours, eager, want, ours.dtype)


def prior(like):
    return torch.linspace(-1, 1, V, dtype=like.dtype)


def gated(model, tokens, gate):
    own = torch.tensor(gate, dtype=torch.float64, requires_grad=True)
    z = model(tokens)[0]
    loss = F.cross_entropy((own * z + prior(z)).view(-1, V), torch.arange(tokens.numel()))
    (gradient,) = torch.autograd.grad(loss, own, retain_graph=True)
    return loss + gradient


CHAINS = {
    "a gate of 0": lambda model, x: gated(model, x, 0.0),
    "a gate": lambda model, x: gated(model, x, 0.3),
    "factors that underflow": lambda model, x: (model(x)[0] * 1e-200 * 1e-200).logsumexp(-1).sum(),
    "factors that would": lambda model, x: (model(x)[0] * 1e-200 * 1e200).logsumexp(-1).sum(),
    "no factor": lambda model, x: (model(x)[0] * 0.0 + 1).logsumexp(-1).sum(),
    "a vector behind a scale": lambda model, x: F.cross_entropy(
        (model(x)[0] / 7 + prior(model(x)[0])).view(-1, V), torch.arange(x.numel())
    ),
    "a cap of a scale of 0": lambda model, x: (5 * torch.tanh(model(x)[0] * 0.0)).logsumexp(-1).sum(),
    "a bound behind a scale": lambda model, x: F.cross_entropy(
        (model(x)[0] * 0.5 + torch.finfo(torch.float64).min * (torch.arange(V) == 2).double()).view(-1, V),
        torch.full((x.numel(),), 3),
    ),
    "twice a vector": lambda model, x: F.cross_entropy(
        (model(x)[0] + prior(model(x)[0]) - 3 * prior(model(x)[0])).view(-1, V), torch.arange(x.numel())
    ),
    "times a vector": lambda model, x: F.cross_entropy(
        (model(x)[0] * prior(model(x)[0])).view(-1, V),
        torch.arange(x.numel()),
        label_smoothing=0.1,
        weight=torch.linspace(0.5, 2, V, dtype=torch.float64),
    ),
    "differences of logits": lambda model, x: (
        lambda z: F.cross_entropy((z - 0.25 * z).view(-1, V), torch.arange(x.numel()), reduction="none").sum()
    )(model(x)[0]),
}


@pytest.mark.parametrize("name", CHAINS)
def test_chain_precision(name):
    model, tokens, _ = make()
    expected, found, deferral = plain_and_deferred(model, lambda model: CHAINS[name](model, tokens))
    assert deferral.materialized == {}
    for ours, want in zip(found, expected):
        assert norm(ours - want) <= 1e-12 * max(1.0, norm(want))


@pytest.mark.parametrize("half", HALVES, ids=str)
def test_divisor_of_half_precision(half):
    """1 / 3 is not rounded to it."""
    model, tokens, targets = make(dtype=half)
    divisor = torch.tensor(3.0, dtype=half)

    def use(model):
        return F.cross_entropy((model(tokens)[0] / divisor).view(-1, V), targets.view(-1), ignore_index=-1)

    check(model, use, dtype=half)


WIDENED = {
    "a cast": lambda z: z.double(),
    "a vector": lambda z: z + torch.linspace(-1, 1, V, dtype=torch.float64),
    "one number of a dimension": lambda z: z * torch.full((1,), 1.5, dtype=torch.float64),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", WIDENED)
def test_loss_in_float64(name, dtype):
    model, tokens, targets = make(dtype=dtype, bias=True)

    def use(model):
        z = WIDENED[name](model(tokens)[0])
        assert z.dtype == torch.float64
        return F.cross_entropy(z.view(-1, V), targets.view(-1), ignore_index=-1)

    expected, found, deferral = plain_and_deferred(model, use)
    assert (deferral.fused, deferral.materialized) == (1, {})
    assert [each.dtype for each in found] == [each.dtype for each in expected]
    for ours, want in zip(found, expected):
        assert norm(ours.double() - want.double()) <= 4 * torch.finfo(want.dtype).eps * norm(want)


@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16], ids=str)
def test_class_weight_of_other_dtype_refused(weight):
    model, tokens, targets = make()
    weights = torch.ones(V, dtype=weight)

    def use():
        return F.cross_entropy(model(tokens)[0].view(-1, V), targets.view(-1).clamp(min=0), weights)

    with pytest.raises(RuntimeError, match="expected scalar type"):
        use()
    with (
        lowtide.defer_logits(model),
        pytest.warns(lowtide.deferred.RealLogitsWarning),
        pytest.raises(RuntimeError, match="expected scalar type"),
    ):
        use()


def test_chunks_summed_in_float32(monkeypatch):
    """A half-precision weight's gradient, of as many terms as there are rows."""
    from lowtide.deferred.recorded import chunks

    monkeypatch.setattr(chunks, "DEFAULT_WORKSPACE", {"cpu": 1})
    torch.manual_seed(0)
    head = nn.Linear(8, V, bias=False, dtype=torch.bfloat16)
    x, factor = torch.randn(700, 8, dtype=torch.bfloat16), torch.linspace(0.5, 1, V, dtype=torch.bfloat16)
    target = torch.randint(V, (700,))

    def gradient(head):
        z = head(x.to(head.weight.dtype)) * factor.to(head.weight.dtype)
        return torch.autograd.grad(F.cross_entropy(z, target), head.weight)[0]

    eager, exact = gradient(head), gradient(copy.deepcopy(head).double())
    with lowtide.defer_logits(head, head=head):
        within_eager(gradient(head), eager, exact, torch.bfloat16)
