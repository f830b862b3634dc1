"""Calls of unaligned tensors, of which some are copied, and calls under autocast are remembered.

Shapes: N tokens, D features, V classes.
"""

import pytest
import torch

import lowtide
from lowtide.ops.linear_cross_entropy.operator import signatures
from tests.ops.linear_cross_entropy.operator.remembered_call.helpers import check, loss_of, tensors

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def shifted(matrix):
    """The same numbers and strides, one element later in memory."""
    wider = torch.empty(matrix.numel() + 1, dtype=matrix.dtype, device=matrix.device)
    return wider[1:].view(matrix.shape).copy_(matrix.detach()).requires_grad_()


def with_gaps(matrix):
    rows, features = matrix.shape
    wider = torch.empty(rows, features + 3, dtype=matrix.dtype, device=matrix.device)
    return wider[:, :features].copy_(matrix.detach()).requires_grad_()


@pytest.mark.parametrize("change", [shifted, with_gaps])
@pytest.mark.parametrize("place", [0, 1])
def test_what_is_read_as_it_lies(device, went, place, change):
    """Where tensors begin tells calls apart."""
    given = list(tensors(device))
    check(*given)
    went.clear()
    given[place] = change(given[place])
    check(*given)
    assert went == ["operator", "straight"]


@pytest.mark.parametrize("change", [shifted, with_gaps])
@pytest.mark.parametrize("place", [0, 1])
def test_call_of_copies(device, went, place, change):
    """From its second call on, the call runs as that of its copies, and is recorded as such."""
    given = list(tensors(device, dtype=torch.bfloat16))
    given[place] = change(given[place])
    check(*given)
    check(*given)
    # "straight" counts the call of the copies, and the call itself, which runs it.
    assert went == ["operator", *["straight"] * 6]
    assert [type(each).__name__ for each in signatures._calls.values()] == ["AlignedCall", "RememberedCall"]


def test_odd_features(device, went):
    given = tensors(device, D=15, dtype=torch.bfloat16)
    check(*given, label_smoothing=0.1)
    assert went == ["operator", "straight", "straight"]


@pytest.mark.parametrize("kind", ["mean", "none", "log-probabilities"])
def test_autocast(device, went, kind):
    """The dtype of autocast tells calls apart; later calls have the first one's bits."""
    x, w, target = tensors(device)

    def call(cast):
        with torch.autocast(device, torch.bfloat16, enabled=cast):
            if kind == "log-probabilities":
                found = lowtide.linear_log_probs(x, w, target, backend="triton").log_prob.sum()
            else:
                found = loss_of(x, w, target, reduction=kind).sum()
        return found, *torch.autograd.grad(found, (x, w))

    found = [call(cast) for cast in (True, True, False, True, False)]
    assert went.count("straight") == 3
    for other in (found[1], found[3]):
        assert all(map(torch.equal, found[0], other))
    assert all(map(torch.equal, found[2], found[4]))
    if device == "cuda":  # a CPU has no products of half precision, so it rounds no operand
        assert not torch.equal(found[0][1], found[2][1])
