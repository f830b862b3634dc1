"""Functions that are mapped over a model's outputs work on the logits."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

import lowtide
from lowtide.deferred import RealLogitsWarning
from lowtide.deferred.recorded.logits import DeferredLogits
from tests.deferred.helpers import V, make, norm, plain_and_deferred

MAPPED = {
    "nothing": lambda z: z,
    "twice": lambda z: 2 * z,
    "negated": torch.neg,
    "halved": lambda z: z / 2,
    "absolute": torch.abs,
    "tanh": lambda z: z.tanh(),
    "flat": lambda z: z.flatten(0, 1),
    "a dimension more": lambda z: z.unsqueeze(0),
    "rows": lambda z: z[:, 1:],
    "in place": lambda z: z.clone().mul_(3),
    "float64": lambda z: z.double(),
    "detached": lambda z: z.detach() + z,
    "a vector": lambda z: z + torch.linspace(0, 1, V, dtype=z.dtype),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", MAPPED)
def test_map_over_outputs(name, bias):
    model, tokens, _ = make(bias=bias)

    def use(model):
        z = tree_map(MAPPED[name], {"logits": (model(tokens)[0],)})["logits"][0]
        return z.logsumexp(-1)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RealLogitsWarning)
        expected, found, _ = plain_and_deferred(model, use)
    assert found[0].shape == expected[0].shape
    for ours, want in zip(found, expected):
        assert norm(ours - want) <= 1e-12 * max(1.0, norm(want))


def test_map_leaf_is_logits():
    model, tokens, _ = make(bias=True)
    expected = model(tokens)[0]
    with lowtide.defer_logits(model):
        logits = model(tokens)[0]
        leaves, spec = tree_flatten([logits, 3])
        assert len(leaves) == 2
        assert isinstance(leaves[0], torch.Tensor)
        assert (leaves[0].shape, leaves[0].dtype) == (expected.shape, expected.dtype)
        assert leaves[0].requires_grad
        assert tree_unflatten(leaves, spec)[0] is logits
        with pytest.warns(RealLogitsWarning, match="sum"):
            total = sum(each.sum() for each in tree_leaves([logits]))
    torch.testing.assert_close(total, expected.sum())


def test_map_leaf_is_real_logits():
    model, tokens, _ = make()
    with lowtide.defer_logits(model):
        logits = model(tokens)[0]
        with pytest.warns(RealLogitsWarning):
            logits.sin()
        assert tree_leaves(logits)[0] is logits.tensor
        assert tree_map(lambda each: each, logits) is logits


def test_map_type_only():
    model, tokens, _ = make()
    with lowtide.defer_logits(model):
        assert tree_map(lambda each: 7, model(tokens)[0]) == 7
        assert tree_map(lambda each: None, model(tokens)[0]) is None


def test_map_leaves_fake_logits():
    """As of an estimate, which looks through a model's outputs."""
    model, tokens, _ = make()
    with lowtide.defer_logits(model), FakeTensorMode(allow_non_fake_inputs=True):
        logits = model(tokens)[0]
        assert tree_map(lambda each: each, logits) is logits


def test_map_identity_keeps_fused():
    model, tokens, targets = make()

    def use(model):
        z = tree_map(lambda each: each.float(), model(tokens)[0])
        return F.cross_entropy(z.double().view(-1, V), targets.view(-1), ignore_index=-1)

    expected, found, deferral = plain_and_deferred(model, use)
    assert (deferral.fused, deferral.materialized) == (1, {})
    for ours, want in zip(found, expected):
        assert norm(ours - want) <= 1e-6 * norm(want)


class Passing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        return inputs

    @staticmethod
    def backward(ctx, *gradients):
        Passing.passed += 1
        return gradients


class Copying(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        return tuple(each.clone() for each in inputs)

    @staticmethod
    def backward(ctx, *gradients):
        Copying.passed += 1
        return gradients


@pytest.mark.parametrize("function", [Passing, Copying])
def test_map_function_passes_leaves(function):
    """As DistributedDataParallel's, whose backward is to be called."""
    function.passed = 0
    model, tokens, targets = make()

    def use(model):
        leaves, spec = tree_flatten(model(tokens)[0])
        z = tree_unflatten(function.apply(*leaves), spec)
        assert isinstance(z, torch.Tensor | DeferredLogits)
        return F.cross_entropy(z.view(-1, V), targets.view(-1), ignore_index=-1)

    expected, found, deferral = plain_and_deferred(model, use)
    assert function.passed == 2
    assert (deferral.fused, deferral.materialized) == (1, {})
    for ours, want in zip(found, expected):
        assert norm(ours - want) <= 1e-12 * norm(want)


def test_map_leaf_hook_refused():
    model, tokens, _ = make()
    with (
        lowtide.defer_logits(model),
        pytest.raises(RuntimeError, match="the loss does not go through these logits"),
    ):
        tree_leaves(model(tokens)[0])[0].register_hook(print)


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
        pytest.raises(RuntimeError, match=r"cannot return deferred logits; return what is made of them"),
    ):
        TRANSFORMS[name](model, tokens)
