"""Calls that are not recorded, since others are to see the operators: modes, subclasses,
autocast.
"""

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ops.attention.helpers import INTERPRETED
from tests.ops.attention.operator.remembered.helpers import attention_of, changed, least_of, repeated

pytest.importorskip("triton")
pytestmark = INTERPRETED


class Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Named(torch.Tensor):
    """A subclass, whose own code is to see the call."""


@pytest.mark.parametrize("mode", [Functions, Dispatches, lambda: torch.profiler.profile(acc_events=True)])
def test_modes_see_the_operators(device, recordings, mode):
    case = least_of(device)
    repeated(case)
    out = attention_of(case)
    recordings.clear()
    with mode():
        attention_of(case)
        if mode is not Functions:  # this mode sees the call of Tensor.backward, and nothing inside it
            out.sum().backward()
    assert not recordings


def test_subclasses_see_the_operators(device, recordings):
    case = least_of(device)
    repeated(case)
    recordings.clear()
    repeated(changed(case, "key", lambda leaf: leaf.detach().as_subclass(Named).requires_grad_()))
    assert not recordings


def test_autocast_is_not_recorded(device, recordings):
    case = least_of(device)
    repeated(case)
    recordings.clear()
    with torch.autocast(device, torch.bfloat16):
        repeated(case)
    assert not recordings


def test_dropout_is_not_recorded(device, recordings):
    case = least_of(device)
    repeated(case)
    recordings.clear()
    repeated(case, p=0.5)
    assert not recordings
