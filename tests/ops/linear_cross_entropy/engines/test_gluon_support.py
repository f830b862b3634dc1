"""Which calls the kernels in Gluon take; and that the others do without it."""

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

import triton

from lowtide.core.kernels import backend


@pytest.mark.parametrize(
    ("release", "capability", "expected"),
    [
        ("3.5.1", (9, 0), False),
        ("3.6.0", (9, 0), True),
        ("3.9.0+git1234", (9, 0), True),
        ("3.10.0", (9, 0), False),
        ("3.6.0", (8, 0), False),
        ("3.6.0", (10, 0), False),
    ],
)
def test_gluon_cards_and_releases(monkeypatch, release, capability, expected):
    monkeypatch.setattr(triton, "__version__", release)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    pipelines_on = backend.pipelines_on.__wrapped__  # without the answers so far
    assert pipelines_on(torch.device("cuda")) == expected
    assert not pipelines_on(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not pipelines_on(torch.device("cuda"))


def test_gluon_large_gemm():
    assert backend.is_large_gemm(1024, 131072, 256)
    assert not backend.is_large_gemm(1024, 128256, 256)
    assert not backend.is_large_gemm(4096, 26240, 256)


def test_tensor_maps():
    whole = torch.zeros(8, 24, dtype=torch.bfloat16)
    assert backend.tma_compatible(whole, whole[1:, :16], whole[:, 8:])
    assert not backend.tma_compatible(whole, whole[:, 1:])  # begins between two multiples of 16 bytes
    assert not backend.tma_compatible(whole.t())
    assert not backend.tma_compatible(whole[:, :20].contiguous())
    assert not backend.tma_compatible(whole[:1].expand(8, 24))
    assert not backend.tma_compatible(whole[:0])


@pytest.mark.extended
def test_without_gluon():
    """A Triton that has none, or another one: everything else is there, and runs."""
    code = """
import sys
sys.modules["triton.experimental"] = None
from lowtide.ops.linear_cross_entropy.engines.exponentials import engine
from lowtide.ops.linear_cross_entropy.engines.soft_targets import engine
from lowtide.ops.linear_cross_entropy.engines.weight_gradient import accumulators
assert not any("gluon" in name for name in sys.modules if name.startswith("lowtide"))
"""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
