"""Heads with code of their own: what their forward does with hidden states and weight."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import lowtide
from lowtide.deferred import RealLogitsWarning
from lowtide.deferred.proxies.logits import DeferredLogits
from tests.deferred.helpers import D, V, differentiated, make, plain_and_deferred
from tests.ops.chunked_loss.helpers import close


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.out = nn.Linear(D, 2 * D), nn.Linear(D, V, bias=False)

    def forward(self, x):
        one, other = self.up(x).chunk(2, -1)
        return self.out(F.silu(one) * other)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.out = nn.GRU(D, D, batch_first=True), nn.Linear(D, V, bias=False)

    def forward(self, x):
        return self.out(self.layer(x)[0])


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.MultiheadAttention(D, 2, batch_first=True)
        self.out = nn.Linear(D, V, bias=False)

    def forward(self, x):
        return self.out(self.layer(x, x, x)[0])


class Largest(nn.Module):
    """Its hidden states pass through a function that returns a named tuple."""

    def __init__(self):
        super().__init__()
        self.up, self.out = nn.Linear(D, 2 * D), nn.Linear(D, V, bias=False)

    def forward(self, x):
        return self.out(self.up(x).unflatten(-1, (2, D)).max(-2).values)


@pytest.mark.parametrize("head", [Gated, Recurrent, Attending, Largest])
def test_head_of_operations_that_return_tuples(head):
    model, tokens, targets = make()
    model.lm_head = head().double()

    def use(model):
        logits = model(tokens)[0]
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    expected = differentiated(model, use(model))
    with lowtide.defer_logits(model, head=model.lm_head) as deferral:
        found = differentiated(model, use(model))
    assert (deferral.fused, deferral.materialized) == (1, {})
    close(found, expected)


def test_head_that_returns_its_hidden_states_too():
    class Both(nn.Linear):
        def forward(self, x):
            x = torch.tanh(x)
            return {"logits": F.linear(x, self.weight), "hidden": x}

    model = nn.Sequential(Both(D, V))
    with lowtide.defer_logits(model, head=model[0]):
        output = model(torch.randn(3, D))
    assert isinstance(output["logits"], DeferredLogits)
    assert type(output["hidden"]) is torch.Tensor


def test_head_that_reads_the_tensor_warns():
    """Its product is of a tensor that the proxy has not made."""

    class Other(nn.Linear):
        def forward(self, x):
            return F.linear(torch.tensor(x.tolist()), self.weight)

    model = nn.Sequential(Other(D, V))
    with (
        lowtide.defer_logits(model, head=model[0]) as deferral,
        pytest.warns(RealLogitsWarning, match="the head's own forward needs real logits"),
    ):
        assert type(model(torch.randn(3, D))) is torch.Tensor
    assert deferral.materialized == {"the head's own forward": 1}


class Product(torch.autograd.Function):
    """As quantised layers have one."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.flatten(0, -2).t() @ x.flatten(0, -2)


def test_head_with_autograd_function():
    """Which would not see the hidden states within an object, and lose their gradient."""

    class Quantised(nn.Linear):
        def forward(self, x):
            return Product.apply(x, self.weight)

    model, tokens, targets = make()
    model.lm_head = Quantised(D, V, bias=False).double()

    def use(model):
        return model(tokens, targets)[1]

    with pytest.warns(RealLogitsWarning, match="the head's own autograd.Function"):
        expected, found, deferral = plain_and_deferred(model, use)
    assert deferral.fused == 0
    close(found, expected)


def test_head_weight_wrapper_subclass():
    """Like DTensor: it knows how to be multiplied, and the fused operator does not."""
    model, tokens, targets = make()
    weight = model.lm_head.weight.detach()
    model.lm_head.weight = nn.Parameter(TwoTensor(weight, weight.clone()))
    expected = model(tokens, targets)[1]
    with lowtide.defer_logits(model) as deferral:
        with pytest.warns(RealLogitsWarning, match="a weight that is a TwoTensor needs real logits"):
            found = model(tokens, targets)[1]
        found.backward()
    assert deferral.fused == 0
    close([found.a], [expected.a])
    assert model.mlp.weight.grad.any()


class Positive(nn.Linear):
    """Before its product a comparison, a length, and a change in place."""

    def forward(self, x):
        x = x * (x > 0)
        x[..., len(x) :] *= 2
        return super().forward(x)


def test_head_with_python_operators():
    model, tokens, targets = make()
    head = Positive(model.lm_head.in_features, V, bias=False).to(model.lm_head.weight.dtype)
    head.weight, model.lm_head = model.lm_head.weight, head

    def use(model):
        return F.cross_entropy(model(tokens)[0].view(-1, V), targets.view(-1), ignore_index=-1)

    expected, found, deferral = plain_and_deferred(model, use)
    assert (deferral.fused, deferral.materialized) == (1, {})
    close(found, expected, torch.float64)


class OtherName(nn.Linear):
    def forward(self, hidden_states):
        return F.linear(hidden_states, self.weight, self.bias)


class AnyArguments(nn.Linear):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class CallsByName(nn.Module):
    def __init__(self, head, name):
        super().__init__()
        self.lm_head, self.name = head(D, V), name

    def forward(self, x):
        return self.lm_head(**{self.name: x})


@pytest.mark.parametrize(
    ("head", "name"),
    [(OtherName, "hidden_states"), (AnyArguments, "input")],
)
def test_head_called_by_a_name_of_its_own(head, name):
    model, x = CallsByName(head, name), torch.randn(5, D)
    expected = F.cross_entropy(model(x), torch.arange(5))
    with lowtide.defer_logits(model, head=model.lm_head) as deferral:
        loss = F.cross_entropy(model(x), torch.arange(5))
        assert (deferral.fused, deferral.materialized) == (1, {})
    close([loss.detach()], [expected.detach()], dtype=torch.float32)


class LowRank(nn.Module):
    """W = A B, whose parts have other sizes than W."""

    def forward(self, a, b):
        return a @ b

    def right_inverse(self, weight):
        return weight[:, :3], torch.ones(3, weight.shape[1])


@pytest.mark.parametrize("wrap", ["spectral norm", "dropout of the weight", "weight norm", "low rank"])
def test_weight_computed_once(wrap):
    """A second computation would move the buffers of spectral_norm and the random generator."""
    losses = []
    for defers in (False, True):
        torch.manual_seed(0)
        head = nn.Linear(D, V, bias=False)
        if wrap == "spectral norm":
            head = nn.utils.parametrizations.spectral_norm(head)
        elif wrap == "weight norm":
            head = nn.utils.parametrizations.weight_norm(head)
        elif wrap == "low rank":
            nn.utils.parametrize.register_parametrization(head, "weight", LowRank())
        else:
            nn.utils.parametrize.register_parametrization(head, "weight", nn.Dropout(0.5))
        deferral = lowtide.defer_logits(head, head=head) if defers else None
        torch.manual_seed(1)
        x, targets = torch.randn(5, D), torch.randint(V, (5,))
        losses += [F.cross_entropy(head(x), targets).detach() for _ in range(3)]
    assert (deferral.fused, deferral.materialized) == (3, {})
    close(losses[3:], losses[:3], dtype=torch.float32)
