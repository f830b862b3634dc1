"""Devices that lowtide has no way for are refused by name.

Tensors without data stand for those of the devices that this machine lacks. torch slices none of these, nor
does its autograd take them, so that chunked_loss, which is plain torch, cannot be tried.
"""

import csv
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import lowtide

N, D, V = 8, 16, 32
DEVICES = ("mps", "xpu")


@pytest.fixture(params=DEVICES)
def tensors(request):
    """Hidden states, weight, targets, and queries of attention."""
    with FakeTensorMode():
        device = torch.device(request.param)
        yield (
            torch.empty(N, D, device=device),
            torch.empty(V, D, device=device),
            torch.empty(N, dtype=torch.long, device=device),
            torch.empty(1, N, 2, D, device=device),
        )


CALLS = {
    "linear_cross_entropy": lambda x, w, y, q: lowtide.linear_cross_entropy(x, w, y),
    "backend torch": lambda x, w, y, q: lowtide.linear_cross_entropy(x, w, y, backend="torch"),
    "linear_log_probs": lambda x, w, y, q: lowtide.linear_log_probs(x, w, y),
    "distillation": lambda x, w, y, q: lowtide.distillation.forward_kl(x, w, x, w),
    "attention": lambda x, w, y, q: lowtide.memory_efficient_attention(q, q, q),
}


@pytest.mark.parametrize("call", CALLS)
def test_device_is_refused_by_name(tensors, call):
    device = tensors[0].device
    with pytest.raises(ValueError, match=rf"must be on the CPU(,| or) a CUDA device.*, got {device}"):
        CALLS[call](*tensors)


def test_table_of_platforms_says_so():
    path = Path(__file__).parents[1] / "docs" / "_data" / "platforms.csv"
    with path.open(newline="") as file:
        rows = {row["call"]: row["status"] for row in csv.DictReader(file) if "(mps)" in row["platform"]}
    assert rows == {"chunked loss": "untested", "every other call": "refused"}
