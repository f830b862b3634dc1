"""Each common spelling of a loss: numbers and gradients of the model as it was, and no logits."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from tests.deferred.helpers import B, T, V, check, make

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def capped(z):
    z = z / 5
    z = torch.tanh(z)
    return z * 5


def shifted(z, y):
    z, y = z[..., :-1, :].contiguous(), y[..., 1:].contiguous()
    return nn.CrossEntropyLoss(ignore_index=-1)(z.view(-1, V), y.view(-1))


def smooth(y):
    """Class probabilities."""
    return (3 * F.one_hot(y.clamp(min=0), V) + 1.0) / (V + 3)


def of_rows(z, y, **options):
    return F.cross_entropy(z.view(-1, V), y.view(-1), ignore_index=-1, **options)


WEIGHT = torch.linspace(0.5, 2, V)
LOSSES = {
    "mean": of_rows,
    "sum": lambda z, y: of_rows(z, y, reduction="sum") / 17,
    "none": lambda z, y: of_rows(z, y, reduction="none"),
    "label smoothing": lambda z, y: of_rows(z, y, label_smoothing=0.1),
    "class weights": lambda z, y: of_rows(z, y, weight=WEIGHT.to(z.dtype)),
    "module": lambda z, y: nn.CrossEntropyLoss(ignore_index=-1)(z.flatten(0, 1), y.flatten()),
    "module with everything": lambda z, y: nn.CrossEntropyLoss(
        weight=WEIGHT.to(z.dtype), ignore_index=-1, reduction="sum", label_smoothing=0.2
    )(z.reshape(-1, V), y.reshape(-1)),
    "by keywords": lambda z, y: F.cross_entropy(
        input=z.view(B * T, V), target=y.view(-1), ignore_index=-1, reduction="mean"
    ),
    "shifted": shifted,
    "sliced": lambda z, y: of_rows(z[:, :-1].reshape(-1, V), y[:, 1:].flatten()),
    "every other": lambda z, y: of_rows(z[:, ::2].flatten(0, 1), y[:, ::2].flatten()),
    "one sequence": lambda z, y: of_rows(z[1], y[1]),
    "the last token": lambda z, y: of_rows(z[:, -1, :], y[:, -1]),
    "one row": lambda z, y: F.cross_entropy(z[0, 0], y[0, 0]),
    "by a mask": lambda z, y: F.cross_entropy(z[y >= 0], y[y >= 0]),
    "by indices": lambda z, y: of_rows(z[torch.tensor([2, 0])], y[torch.tensor([2, 0])]),
    "by a list": lambda z, y: of_rows(z[:, [0, 3]].flatten(0, 1), y[:, [0, 3]].flatten()),
    "in parts": lambda z, y: sum(
        F.cross_entropy(p, q, ignore_index=-1, reduction="sum") for p, q in zip(z.unbind(1), y.unbind(1))
    ),
    "in splits": lambda z, y: sum(
        F.cross_entropy(p.transpose(1, 2), q, ignore_index=-1, reduction="sum")
        for p, q in zip(z.split([2, 5], dim=1), y.split([2, 5], dim=1))
    ),
    "classes second": lambda z, y: F.cross_entropy(z.transpose(1, 2), y, ignore_index=-1),
    "classes second, none": lambda z, y: F.cross_entropy(
        z.permute(0, 2, 1), y, ignore_index=-1, reduction="none"
    ),
    "time first": lambda z, y: F.cross_entropy(
        z.transpose(0, 1).reshape(-1, V), y.t().flatten(), ignore_index=-1
    ),
    "time first, classes second": lambda z, y: F.cross_entropy(z.movedim(1, 0).mT, y.t(), ignore_index=-1),
    "fewer classes": lambda z, y: F.cross_entropy(
        z[..., : V - 1].flatten(0, 1), y.clamp(max=V - 2).flatten(), ignore_index=-1
    ),
    "float": lambda z, y: of_rows(z.to(torch.promote_types(z.dtype, torch.float32)), y),
    "scaled": lambda z, y: of_rows(0.3 * z, y),
    "divided": lambda z, y: of_rows(z / 16.0, y),
    "negative": lambda z, y: of_rows(-z, y),
    "soft cap": lambda z, y: of_rows(capped(z), y),
    "scale, then soft cap": lambda z, y: of_rows(capped(z * 2), y),
    "soft cap, then temperature": lambda z, y: of_rows(capped(z) / 0.7, y),
    "detached copy aside": lambda z, y: of_rows(z, y) + z.detach().logsumexp(-1).sum() * 0,
    "nll_loss": lambda z, y: F.nll_loss(F.log_softmax(z.view(-1, V), dim=-1), y.view(-1), ignore_index=-1),
    "nll_loss, weights": lambda z, y: nn.NLLLoss(WEIGHT.to(z.dtype), ignore_index=-1)(
        z.flatten(0, 1).log_softmax(1), y.flatten()
    ),
    "probabilities": lambda z, y: F.cross_entropy(z.view(-1, V), smooth(y).view(-1, V).to(z.dtype)),
    "probabilities, classes second": lambda z, y: F.cross_entropy(
        z.transpose(1, 2), smooth(y).transpose(1, 2).to(z.dtype), reduction="sum", label_smoothing=0.1
    ),
    "probabilities, class weights": lambda z, y: F.cross_entropy(
        z.view(-1, V), smooth(y).view(-1, V).to(z.dtype), weight=WEIGHT.to(z.dtype)
    ),
    "probabilities, class weights, none": lambda z, y: F.cross_entropy(
        z.transpose(1, 2),
        smooth(y).transpose(1, 2).to(z.dtype),
        weight=WEIGHT.to(z.dtype),
        reduction="none",
        label_smoothing=0.2,
    ),
    "probabilities, class weights of another dtype": lambda z, y: nn.CrossEntropyLoss(WEIGHT)(
        z.view(-1, V), smooth(y).view(-1, V)
    ),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LOSSES)
def test_loss_spellings(name, dtype, bias):
    model, tokens, targets = make(dtype=dtype, bias=bias)
    fused = {"in parts": T, "in splits": 2}.get(name, 1)
    check(model, lambda model: LOSSES[name](model(tokens)[0], targets), fused=fused, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tied", [False, True])
def test_loss_of_model(tied, dtype):
    model, tokens, targets = make(dtype=dtype, tied=tied)
    check(model, lambda model: model(tokens, targets)[1], dtype=dtype)


@pytest.mark.parametrize("name", ["scaled", "after a soft cap"])
def test_learned_scale(name):
    model, tokens, targets = make()
    model.scale = nn.Parameter(torch.tensor(1.3, dtype=torch.float64))

    def loss(model):
        z = model(tokens)[0] * model.scale
        return of_rows(z if name == "scaled" else capped(z), targets)

    check(model, loss)


@pytest.mark.parametrize("shape", [(V,), (1, V), (1, 1, V)])
@pytest.mark.parametrize("place", ["first", "after a scale", "before a soft cap", "subtracted"])
def test_bias_added(shape, place):
    model, tokens, targets = make(bias=place == "first")
    model.extra = nn.Parameter(torch.randn(shape, dtype=torch.float64))

    def loss(model):
        z = model(tokens)[0]
        if place == "subtracted":
            z = z - model.extra
        else:
            z = (z * 3 if place == "after a scale" else z) + model.extra
        return of_rows(capped(z) if "cap" in place else z, targets)

    check(model, loss)


class Adapted(nn.Linear):
    """LoRA as adapters write it: one term more, within the head's forward."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.down, self.up = nn.Linear(self.in_features, 4), nn.Linear(4, self.out_features, bias=False)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x):
        result = super().forward(x)
        result = result + self.up(self.down(self.dropout(x.to(self.down.weight.dtype)))) * 2.0
        return result.to(x.dtype)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_adapter_on_head(dtype, frozen):
    model, tokens, targets = make()
    model.lm_head = Adapted(16, V, bias=True)
    model.to(dtype)
    model.lm_head.weight.requires_grad_(not frozen)
    check(model, lambda model: model(tokens, targets)[1], dtype=dtype)


def test_adapter_of_other_dtype():
    """bfloat16 below, float32 adapters, as peft makes them."""
    model, tokens, targets = make(dtype=torch.bfloat16)
    model.lm_head = Adapted(16, V).bfloat16()
    model.lm_head.down.float(), model.lm_head.up.float()
    check(model, lambda model: model(tokens, targets)[1], dtype=torch.bfloat16)


class Normed(nn.Module):
    """A head with something before its product."""

    def __init__(self, weight, matmul):
        super().__init__()
        self.norm, self.matmul = nn.LayerNorm(weight.shape[1]), matmul
        self.out = nn.Linear(weight.shape[1], weight.shape[0], bias=False)

    def forward(self, x):
        x = self.norm(x) * 0.5
        return x @ self.out.weight.t() if self.matmul else self.out(x)


@pytest.mark.parametrize("matmul", [False, True])
def test_head_more_than_product(matmul):
    model, tokens, targets = make()
    model.lm_head = Normed(model.wte.weight, matmul).double()
    expected = model(tokens, targets)[1]
    with lowtide.defer_logits(model, head=model.lm_head) as deferral:
        torch.testing.assert_close(model(tokens, targets)[1], expected)
    assert (deferral.fused, deferral.materialized) == (1, {})


def test_half_precision_loss_in_float32():
    model, tokens, targets = make(dtype=torch.bfloat16)
    with lowtide.defer_logits(model):
        assert model(tokens, targets)[1].dtype == torch.float32


ERRORS = {
    "too few targets": lambda z, y: F.cross_entropy(z.view(-1, V), y.view(-1)[1:]),
    "classes last": lambda z, y: F.cross_entropy(z, y),
    "float targets": lambda z, y: F.cross_entropy(z.view(-1, V), y.view(-1).double()),
    "unknown reduction": lambda z, y: F.cross_entropy(z.view(-1, V), y.view(-1), reduction="other"),
    "out of range": lambda z, y: F.cross_entropy(z.view(-1, V), y.view(-1) + V),
    "class weights": lambda z, y: of_rows(z, y, weight=WEIGHT[1:].double()),
    "probabilities, class weights": lambda z, y: F.cross_entropy(
        z.view(-1, V), smooth(y).view(-1, V).double(), WEIGHT[1:].double()
    ),
    "probabilities, an ignored class": lambda z, y: F.cross_entropy(
        z.view(-1, V), smooth(y).view(-1, V).double(), ignore_index=3
    ),
    "probabilities of fewer classes": lambda z, y: F.cross_entropy(
        z.view(-1, V), smooth(y).view(-1, V)[:, 1:].double()
    ),
    "smoothing": lambda z, y: F.cross_entropy(z.view(-1, V), y.view(-1), label_smoothing=2.0),
    "view": lambda z, y: z.view(-1, V + 1),
    "index": lambda z, y: z[B],
}


@pytest.mark.filterwarnings("ignore::lowtide.deferred.RealLogitsWarning")
@pytest.mark.parametrize("name", ERRORS)
def test_errors_of_torch(name):
    model, tokens, targets = make()
    targets = targets.clamp(min=0)
    errors = (RuntimeError, ValueError, IndexError)
    with pytest.raises(errors):
        ERRORS[name](model(tokens)[0], targets)
    with lowtide.defer_logits(model), pytest.raises(errors):
        ERRORS[name](model(tokens)[0], targets)
