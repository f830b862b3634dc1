"""Check which features each generation of NVIDIA GPUs has, and that nothing else asks for a
capability."""

from pathlib import Path

import pytest
import torch

import lowtide
from lowtide.core.kernels import backend

CUDA = torch.device("cuda", 0)
FIRST = 91100  # of cuDNN


@pytest.fixture
def card(monkeypatch):
    """Let there be an NVIDIA GPU of this capability, or none."""

    def there(capability):
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: FIRST)

    return there


@pytest.mark.parametrize(
    ("capability", "bfloat16", "warpgroup", "unequal"),
    [
        (None, False, False, False),
        ((7, 5), False, False, False),
        ((8, 0), True, False, False),
        ((8, 6), True, False, False),
        ((8, 9), True, False, False),
        ((9, 0), True, True, True),
        ((10, 0), True, False, True),
        ((10, 3), True, False, True),
        ((12, 0), True, False, False),
    ],
)
def test_features_of_generation(card, monkeypatch, capability, bfloat16, warpgroup, unequal):
    card(capability)
    assert backend.is_there(CUDA) == (capability is not None)
    assert backend.has_bfloat16_mma(CUDA) == bfloat16
    assert backend.has_warpgroup_mma(CUDA) == warpgroup
    assert backend.has_cudnn_unequal_features(CUDA, FIRST) == unequal
    assert not backend.has_cudnn_unequal_features(CUDA, FIRST + 1)
    monkeypatch.setattr(torch.version, "hip", "7.0")  # an AMD card has another meaning for the numbers
    assert not backend.is_there(CUDA)
    assert not backend.has_bfloat16_mma(CUDA)


def test_cpu_has_no_feature(card):
    card((9, 0))
    assert not backend.has_bfloat16_mma(torch.device("cpu"))
    assert not backend.has_warpgroup_mma(torch.device("meta"))


def test_nothing_else_asks_for_a_capability():
    package = Path(lowtide.__file__).parent
    asking = {path for path in package.rglob("*.py") if "get_device_capability" in path.read_text()}
    assert asking == {Path(backend.__file__)}
