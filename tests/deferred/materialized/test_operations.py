"""Operations that make real logits: to the bit those of the model, announced once.

Of some rows or classes only these are made, and a smaller product may round in another way.
"""

import warnings

import pytest
import torch
import torch.nn.functional as F

import lowtide
from lowtide.deferred import RealLogitsWarning
from tests.deferred.helpers import B, T, V, make, plain_and_deferred
from tests.ops.chunked_loss.helpers import close

# Operations that materialise the logits, and their names in the warning.
OPERATIONS = {
    "sort": (lambda z: z.sort(-1).values, r"torch\.sort"),
    "function": (lambda z: torch.sigmoid(z), r"torch\.sigmoid"),
    "functional": (lambda z: F.gelu(z), r"torch\.nn\.functional\.gelu"),
    "operator": (lambda z: z + torch.ones(B, T, V, dtype=z.dtype), r"Tensor\.__add__"),
    "reflected": (lambda z: 1 - z, r"Tensor\.__rsub__"),
    "on the right": (lambda z: torch.ones(B, T, 1, dtype=z.dtype) * z, "mul"),
    "comparison": (lambda z: torch.where(z > 0, z, -z), r"Tensor\.__gt__"),
    "of all": (lambda z: z.std(), r"torch\.std"),
    "over rows": (lambda z: z.softmax(1), r"torch\.softmax"),
    "largest of all": (lambda z: z.max(), r"torch\.max"),
    "a class": (lambda z: z[..., 3], r"Tensor\.__getitem__"),
    "a new dimension": (lambda z: z[None], r"Tensor\.__getitem__"),
    "mixing view": (lambda z: z.view(-1), r"Tensor\.view|torch\.view"),
    "moved": (lambda z: z.cpu(), r"Tensor\.cpu"),
    "stack": (lambda z: torch.stack([z, z]), r"torch\.stack"),
    "einsum": (lambda z: torch.einsum("btv,btv->bt", z, z), r"torch\.einsum"),
    "after scale and cap": (lambda z: (7 * torch.tanh(z.float() / 7)).sigmoid(), r"torch\.sigmoid"),
    "a loss of some rows": (
        lambda z: F.cross_entropy(z.float().cumsum(1).view(-1, V), torch.arange(B * T)),
        "cumsum",
    ),
    "another loss": (lambda z: F.mse_loss(z, torch.zeros(B, T, V, dtype=z.dtype)), "mse_loss"),
    "transposed": (lambda z: z.view(-1, V).T.sin(), r"torch\.sin"),
}
PARTS = {
    "after a shift": lambda z: z[:, 1:].transpose(1, 2).sigmoid(),
    "a sequence": lambda z: z[0].T.sin(),
    "some classes": lambda z: z[..., 3:9].sin(),
    "by indices": lambda z: z[torch.tensor([0, 0, 2]), 1:].sin(),
    "a product of its own each": lambda z: z.tanh().tanh().logsumexp(-1) + z.tanh().tanh().sin().sum(-1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPERATIONS)
def test_materialized_exact_with_one_warning(name, dtype):
    use, operation = OPERATIONS[name]
    model, tokens, _ = make(bias=True, dtype=dtype)
    expected = use(model(tokens)[0])
    gradients = torch.autograd.grad(expected.sum(), list(model.parameters()))
    with lowtide.defer_logits(model) as deferral:
        with pytest.warns(RealLogitsWarning, match=f"{operation} needs real logits") as caught:
            found = use(model(tokens)[0])
        assert {warning.filename for warning in caught} == {__file__}
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # once
            again = use(model(tokens)[0])
    assert sum(deferral.materialized.values()) == 2 * len(caught)
    assert torch.equal(found, expected)
    assert torch.equal(again, expected)
    for ours, theirs in zip(torch.autograd.grad(found.sum(), list(model.parameters())), gradients):
        assert torch.equal(ours, theirs)


@pytest.mark.filterwarnings("ignore::lowtide.deferred.RealLogitsWarning")
@pytest.mark.parametrize("name", PARTS)
def test_materialized_slices(name):
    model, tokens, _ = make(bias=True)
    expected, found, deferral = plain_and_deferred(model, lambda model: PARTS[name](model(tokens)[0]))
    assert sum(deferral.materialized.values()) == 1
    close(found, expected, torch.float32)
