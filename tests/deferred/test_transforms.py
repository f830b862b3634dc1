"""Transforms around deferred logits: the same numbers as of real ones."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap

import lowtide
from lowtide.deferred import RealLogitsWarning
from tests.deferred.helpers import V, differentiated, make

pytestmark = pytest.mark.filterwarnings("ignore::lowtide.deferred.RealLogitsWarning")


def prior(z):
    return torch.linspace(-1, 1, V, dtype=torch.float64)


def entropy(z):
    log_p = z.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


USES = {
    "cross_entropy": lambda z: F.cross_entropy(z.flatten(0, -2), torch.arange(z[..., 0].numel())),
    "in chunks": lambda z: F.cross_entropy(
        (2 * z + prior(z)).flatten(0, -2),
        torch.arange(z[..., 0].numel()),
        torch.linspace(0.5, 2, V, dtype=z.dtype),
    ),
    "logsumexp": lambda z: z.logsumexp(-1).sum(),
    "log-probabilities": lambda z: (
        z.log_softmax(-1).gather(-1, torch.ones(*z.shape[:-1], 1, dtype=torch.long)).sum()
    ),
    "rows": lambda z: z[:, 1:].logsumexp(-1).sum(),
    "largest": lambda z: z.max(-1)[0].sum(),
    "entropy": lambda z: entropy(z).sum(),
    "some": lambda z: z.topk(3, -1).values.sum(),
    "real": lambda z: z.sigmoid().sum(),
    "materialize": lambda z: (z if isinstance(z, torch.Tensor) else z.materialize()).tanh().sum(),
}


@pytest.mark.parametrize("name", USES)
def test_gradients_and_tangents(name):
    model, tokens, _ = make(bias=True)
    parameters = {key: value.detach() for key, value in model.named_parameters()}
    tangents = {key: torch.randn_like(value) for key, value in parameters.items()}

    def use(parameters):
        return USES[name](functional_call(model, parameters, (tokens,))[0])

    def outcome():
        return *jvp(use, (parameters,), (tangents,)), grad(use)(parameters)

    expected = outcome()
    with lowtide.defer_logits(model):
        found = outcome()
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)
    assert expected[1] != 0


@pytest.mark.parametrize("name", [name for name in USES if name not in ("cross_entropy", "in chunks")])
def test_batches(name):
    model, tokens, _ = make(bias=True)

    def use(tokens):
        return USES[name](model(tokens[None])[0])

    expected = vmap(use)(tokens)
    with lowtide.defer_logits(model):
        torch.testing.assert_close(vmap(use)(tokens), expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", ["cross_entropy", "logsumexp", "real"])
def test_forward_mode(name):
    model, tokens, _ = make(bias=True)
    hidden = torch.tanh(model.wte(tokens)).detach()

    def tangent():
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(hidden, torch.ones_like(hidden))
            return forward_ad.unpack_dual(USES[name](model.lm_head(dual))).tangent

    expected = tangent()
    with lowtide.defer_logits(model):
        torch.testing.assert_close(tangent(), expected, rtol=1e-11, atol=1e-13)


def test_class_weight_changed_before_backward():
    model, tokens, targets = make()
    weight = torch.linspace(0.5, 2, V, dtype=torch.float64)
    with lowtide.defer_logits(model):
        z = (2 * model(tokens)[0] + prior(None)).view(-1, V)
        loss = F.cross_entropy(z, targets.view(-1).clamp(min=0), weight)
        weight.mul_(3)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


HEADS = {
    "keywords": lambda head, x: F.linear(input=x, weight=head.weight),
    "mm": lambda head, x: torch.mm(x, head.weight.t()),
    "method": lambda head, x: x.mm(head.weight.t()),
    "a factor first": lambda head, x: F.linear(torch.tensor(2.0, dtype=x.dtype) * x, head.weight),
}
OTHERS = {
    "einsum": lambda head, x: torch.einsum("nd,vd->nv", x, head.weight),
    "tensordot": lambda head, x: torch.tensordot(x, head.weight, dims=([1], [1])),
    "addmm": lambda head, x: torch.addmm(torch.zeros(V, dtype=x.dtype), x, head.weight.t()),
}


class Head(torch.nn.Module):
    def __init__(self, product, like):
        super().__init__()
        self.weight, self.product = like.weight, product

    def forward(self, x):
        return self.product(self, x.flatten(0, -2))


@pytest.mark.parametrize("name", [*HEADS, *OTHERS])
def test_products_of_other_kinds(name):
    """Deferred, or real with a warning; never silently real."""
    model, tokens, targets = make()
    model.lm_head = Head((HEADS | OTHERS)[name], model.lm_head)

    def outcome():
        loss = F.cross_entropy(model(tokens)[0].view(-1, V), targets.view(-1), ignore_index=-1)
        return differentiated(model, loss)

    expected = outcome()
    with lowtide.defer_logits(model, head=model.lm_head) as deferral:
        found = outcome()
    assert (deferral.fused, sum(deferral.materialized.values())) == ((1, 0) if name in HEADS else (0, 1))
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_checkpointing_reentrant_no_grad():
    """As of an evaluation in training mode: nothing is lost where nothing is differentiated."""
    model, tokens, targets = make()

    def loss():
        x = torch.tanh(model.wte(tokens))
        z = torch.utils.checkpoint.checkpoint(model.lm_head, x, use_reentrant=True)
        return F.cross_entropy(z.view(-1, V), targets.view(-1), ignore_index=-1)

    with torch.no_grad():
        expected = loss()
        with lowtide.defer_logits(model) as deferral:
            torch.testing.assert_close(loss(), expected, rtol=1e-12, atol=0)
    assert (deferral.fused, deferral.materialized) == (1, {})


def test_product_of_other_kind_warns():
    model, tokens, _ = make()
    model.lm_head = Head(OTHERS["einsum"], model.lm_head)
    with lowtide.defer_logits(model, head=model.lm_head), pytest.warns(RealLogitsWarning, match="einsum"):
        assert isinstance(model(tokens)[0], torch.Tensor)
