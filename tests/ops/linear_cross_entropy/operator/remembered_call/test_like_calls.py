"""A call like an earlier one goes straight to its engine.

Shapes: N tokens, D features.
"""

import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.ops.linear_cross_entropy.operator import signatures
from tests.ops.linear_cross_entropy.operator.remembered_call.helpers import D, check, loss_of, tensors

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_first_call_computed_again_by_checkpoint(device, dtype):
    """The second call saves what the first one did, though calls like it are known by then."""
    x, w, target = tensors(device, N=14, dtype=dtype)
    found = []

    def loss(x, w):
        return loss_of(x, w, target)

    for call in (2 * [lambda *own: checkpoint(loss, *own, use_reentrant=False)]) + 2 * [loss]:
        found.append(torch.autograd.grad(call(x, w), (x, w)))
    for gradients in found[:-1]:
        for got, want in zip(gradients, found[-1]):
            assert torch.equal(got, want)


def test_like_call_goes_straight(device, went):
    check(*tensors(device))
    check(*tensors(device))  # other tensors
    assert went == ["operator", "straight", "straight", "straight"]


@pytest.mark.parametrize("kind", ["none", "log-probabilities"])
def test_calls_by_row_go_straight(device, went, kind):
    """Their results are told apart from those of a mean, and keep the input's leading shape."""
    x, w, target = tensors(device)
    check(x, w, target)
    went.clear()

    def call(x, target):
        if kind == "none":
            return (loss_of(x, w, target, reduction="none"),)
        return lowtide.linear_log_probs(x, w, target, backend="triton")

    for given in ((x, target), (x, target), (x.view(3, 4, D), target.view(3, 4))):
        found = call(*given)
        assert all(each.shape == given[1].shape for each in found)
        found[0].sum().backward()
    assert went == ["operator", "operator", "straight", "operator", "operator"]
    node = {"none": "linear_cross_entropyBackward", "log-probabilities": "linear_log_probsBackward"}[kind]
    assert call(x, target)[0].grad_fn.name() == node


def test_no_tensor_is_kept(device):
    x, w, target = tensors(device)
    check(x, w, target)
    assert signatures._calls
    kept = [weakref.ref(each) for each in (x, w)]
    del x, w
    gc.collect()
    assert [each() for each in kept] == [None] * 2
