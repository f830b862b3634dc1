"""Functions that are mapped over a model's outputs work on the logits."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

import lowtide
from lowtide.deferred import RealLogitsWarning
from lowtide.deferred.proxies.logits import DeferredLogits
from tests.deferred.helpers import V, differentiated, make, norm, plain_and_deferred
from tests.ops.chunked_loss.helpers import close

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
    __module__ = "torch.distributed.fsdp.test"

    @staticmethod
    def forward(ctx, *inputs):
        return inputs

    @staticmethod
    def backward(ctx, *gradients):
        Passing.passed += 1
        return gradients


class Copying(torch.autograd.Function):
    __module__ = "torch.nn.parallel.test"

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


class Halving(torch.autograd.Function):
    """Gives half of its gradient: what the head's weight would not know of."""

    @staticmethod
    def forward(ctx, input, copy):
        return copy(input)

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 2, None


class HalvingWithoutContext(torch.autograd.Function):
    @staticmethod
    def forward(input, copy):
        return copy(input)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 2, None


COPIES = {
    "itself": lambda z: z,
    "a view": lambda z: z.view_as(z),
    "a clone": lambda z: z.clone(),
    "detached": lambda z: z.detach(),
    "a product": lambda z: z * 1,
    "a clone changed in place": lambda z: z.clone().mul_(3),
}


AFTER = {"nothing": lambda z: z, "a product": lambda z: 2 * z, "an operation": torch.sigmoid}


@pytest.mark.parametrize("function", [Halving, HalvingWithoutContext])
@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("name", COPIES)
def test_map_other_function_refused(name, after, function):
    """Without gradients, and of real logits, it is called."""
    model, tokens, _ = make()

    def use(logits):
        mapped = tree_map(lambda each: AFTER[after](function.apply(each, COPIES[name])), [logits])
        return mapped[0].logsumexp(-1).sum() + logits.logsumexp(-1).sum()

    expected = differentiated(model, use(model(tokens)[0]))
    with lowtide.defer_logits(model):
        with pytest.raises(RuntimeError, match=r"an autograd.Function, was given deferred logits"):
            use(model(tokens)[0])
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", RealLogitsWarning)
            torch.testing.assert_close(use(model(tokens)[0]), expected[0], rtol=1e-12, atol=0)
        with pytest.warns(RealLogitsWarning, match="materialize"):
            found = differentiated(model, use(model(tokens)[0].materialize()))
    for ours, want in zip(found, expected):
        assert norm(ours - want) <= 1e-12 * norm(want)


def test_map_leaf_hook_refused():
    model, tokens, _ = make()
    with (
        lowtide.defer_logits(model),
        pytest.raises(RuntimeError, match="the loss does not go through these logits"),
    ):
        tree_leaves(model(tokens)[0])[0].register_hook(print)


def test_map_two_trees():
    model, tokens, _ = make()
    other = torch.flip(tokens, (1,))

    def use(model):
        first, second = ({"logits": model(each)[0]} for each in (tokens, other))
        return tree_map(lambda a, b: a.logsumexp(-1) - 2 * b.logsumexp(-1), first, second)["logits"]

    expected, found, deferral = plain_and_deferred(model, use)
    assert deferral.materialized == {}
    for ours, want in zip(found, expected):
        assert norm(ours - want) <= 1e-12 * norm(want)


@pytest.mark.filterwarnings("ignore::lowtide.deferred.RealLogitsWarning")
def test_change_of_a_view_behind_a_function():
    """It changes the logits that have passed; those from before do not change, and are refused."""
    model, tokens, targets = make()

    def use(model):
        before = model(tokens)[0]
        leaves, spec = tree_flatten(before)
        z = tree_unflatten(Copying.apply(*leaves), spec)
        z[..., :5] += 0.25
        if isinstance(before, DeferredLogits):
            with pytest.raises(RuntimeError, match="changed in place"):
                before.logsumexp(-1)
        return F.cross_entropy(z.view(-1, V), targets.view(-1), ignore_index=-1)

    Copying.passed = 0
    expected, found, _ = plain_and_deferred(model, use)
    close(found, expected)
    assert Copying.passed == 2


def test_change_before_a_function():
    """The logits that have passed may be views, depending on the Function; so they are refused."""
    model, tokens, _ = make()
    with lowtide.defer_logits(model):
        before = model(tokens)[0]
        leaves, spec = tree_flatten(before)
        z = tree_unflatten(Copying.apply(*leaves), spec)
        before *= 2
        before.logsumexp(-1)
        with pytest.raises(RuntimeError, match="changed in place"):
            z.logsumexp(-1)


@pytest.mark.filterwarnings("ignore::lowtide.deferred.RealLogitsWarning")
def test_mapped_over_two_outputs():
    """The function chooses of which; structures are equal wherever both have logits."""
    model, tokens, _ = make()
    with lowtide.defer_logits(model):
        first, second = model(tokens)[0], model(tokens.flip(0))[0]
        for made in (None, first, second):
            if made is not None:
                made.materialize()
            for choose, expected in ((lambda a, b: a, first), (lambda a, b: b, second)):
                found = tree_map(choose, {"z": first}, {"z": second})["z"]
                assert torch.equal(found.argmax(-1), expected.argmax(-1))
