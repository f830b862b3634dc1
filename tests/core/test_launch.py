"""Launches that are remembered, beside those of Triton."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import lowtide
from lowtide.core.kernels import launch
from lowtide.core.kernels.backend import cdiv, next_power_of_2

ODD_POINTERS, UNKNOWN_TYPES = 2, 2  # numbers among the 24 cases, each with two sets of constants


@pytest.mark.extended
def test_same_kernels_and_values_as_triton():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.core.launches_without_a_card"],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    launches, last, of_gluon, last_of_gluon = lines[:96], lines[96], lines[97:-1], lines[-1]
    assert len(of_gluon) == 32
    assert not [each["arguments"] for each in launches + of_gluon if not each["same"]]
    # The second time, addresses stand for tensors wherever the launch was remembered.
    through_triton = sum(each["tensors"] for each in launches[48:])
    assert through_triton == 2 * (ODD_POINTERS + UNKNOWN_TYPES)
    assert last["known"] <= 48 - through_triton
    assert not any(each["tensors"] for each in of_gluon[16:])
    assert last_of_gluon["known"] == 12  # of 16, since one tensor lies as another does


def test_sizes_as_of_triton():
    import triton

    for number in range(1, 300):
        assert next_power_of_2(number) == triton.next_power_of_2(number)
        assert cdiv(number, 7) == triton.cdiv(number, 7)
    assert cdiv(0, 7) == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("first", [0, 1], ids=["aligned", "odd"])
def test_same_bits_as_by_triton(monkeypatch, reduction, first):
    """Twice remembered, and by Triton; an input that begins at an odd address is left to Triton."""
    torch.manual_seed(0)
    memory = torch.randn(40 * 64 + 8, device="cuda", dtype=torch.bfloat16)
    x = memory[first : first + 40 * 64].view(40, 64).requires_grad_()
    w = torch.randn(1000, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(1000, (40,), device="cuda")
    found = []
    for by_triton in (False, False, True):
        if by_triton:
            monkeypatch.setattr(launch.RememberedKernel, "__getitem__", lambda self, grid: self.kernel[grid])
        loss = lowtide.linear_cross_entropy(x, w, target, reduction=reduction)
        found.append((loss, *torch.autograd.grad(loss.sum(), (x, w))))
    for results in found[1:]:
        assert all(map(torch.equal, results, found[0]))
