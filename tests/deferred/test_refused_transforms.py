"""Transforms of torch.func refuse deferred logits that they would take or return as tensors."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

import lowtide
from lowtide.deferred import RealLogitsWarning
from tests.deferred.helpers import V, make, norm, plain_and_deferred

TRANSFORMS = {
    "grad with has_aux": lambda model, x: torch.func.grad(lambda w: (w.sum(), model(x)[0]), has_aux=True)(
        torch.ones(2)
    ),
    "vmap": lambda model, x: torch.func.vmap(lambda each: model(each)[0])(x),
    "vjp": lambda model, x: torch.func.vjp(lambda w: model(x)[0], torch.ones(2)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transform_returns_logits_refused(name):
    model, tokens, _ = make()
    with (
        lowtide.defer_logits(model),
        pytest.raises(RuntimeError, match=r"neither take nor return deferred logits; give it"),
    ):
        TRANSFORMS[name](model, tokens)


def mean(z):
    return z.logsumexp(-1).mean()


TAKING = {
    "vmap": torch.func.vmap(mean),
    "vmap of one of two": lambda z: torch.func.vmap(lambda a, b: mean(a["z"]) + b, (0, None))({"z": z}, 1.0),
    "vmap twice": torch.func.vmap(torch.func.vmap(mean)),
    "vmap of another dimension": torch.func.vmap(mean, 1),
    "grad": torch.func.grad(mean),
    "grad_and_value": torch.func.grad_and_value(mean),
    "vjp": lambda z: torch.func.vjp(mean, z),
    "jacrev": torch.func.jacrev(mean),
    "jacfwd": torch.func.jacfwd(mean),
    "functionalize": torch.func.functionalize(mean),
}


@pytest.mark.parametrize("name", TAKING)
def test_transform_takes_logits_refused(name):
    """Its tensors would be the hidden states. Real logits are taken."""
    model, tokens, _ = make()
    expected = TAKING[name](model(tokens)[0].detach())
    with lowtide.defer_logits(model):
        logits = model(tokens)[0]
        with pytest.raises(RuntimeError, match=r"neither take nor return deferred logits; give it"):
            TAKING[name](logits)
        with pytest.warns(RealLogitsWarning, match="materialize"):
            found = TAKING[name](logits.detach().materialize())
    for ours, want in zip(tree_leaves(found), tree_leaves(expected)):
        if isinstance(want, torch.Tensor):
            torch.testing.assert_close(ours, want, rtol=1e-12, atol=1e-12)


def test_transform_closes_over_logits():
    model, tokens, targets = make()
    several = torch.stack([targets, targets.flip(0)])

    def use(model):
        logits = model(tokens)[0]

        def loss(logits, targets):
            return F.cross_entropy(logits.view(-1, V), targets.view(-1), ignore_index=-1)

        return torch.func.vmap(loss, (None, 0))(logits, several).sum()

    expected, found, _ = plain_and_deferred(model, use)
    for ours, want in zip(found, expected):
        assert norm(ours - want) <= 1e-12 * norm(want)


def test_transform_takes_real_logits_of_leaves():
    model, tokens, _ = make()
    expected = torch.func.jvp(mean, *((model(tokens)[0],),) * 2)
    with lowtide.defer_logits(model), pytest.warns(RealLogitsWarning, match="dual"):
        found = torch.func.jvp(mean, *((model(tokens)[0],),) * 2)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
