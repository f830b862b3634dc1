"""A few queries of many keys, in one part and in several: through the interpreter on the CPU, for
real on a GPU. The same truth and budget as the other kernels have."""

import pytest
import torch

from lowtide import attn_bias as masks
from tests.ops.attention.helpers import INTERPRETED, check_triton, laid_out, make_case, ours
from tests.support.extended import all_extended_but
from tests.support.loss import skip_unless_runnable

pytest.importorskip("triton")
few = pytest.importorskip("lowtide.ops.attention.triton_backend.launch_few_queries")

pytestmark = INTERPRETED


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """Any number of keys is many. Gives the launches, of several parts unless asked for one."""
    monkeypatch.setattr(few, "FEWEST_KEYS", 1)
    monkeypatch.setattr(few, "PROGRAMS", 8)
    found, launch = [], few.forward
    monkeypatch.setattr(few, "forward", lambda *given: found.append(launch(*given)))
    return found


CASES = {
    "plain": {},
    "one query": {"M": 1},
    "whole tile": {"M": 16, "H": 4, "G": 1},
    "odd group": {"H": 6, "G": 2, "E": 24},
    "no shared heads": {"H": 1, "G": 1, "M": 37},
    "causal": {"mask": masks.LowerTriangularFromBottomRightMask()},
    "causal from the top left": {"mask": masks.LowerTriangularMask()},  # parts that nobody sees
    "window": {"window": (70, 0)},
    "sequences": {"B": 1, "mask": masks.BlockDiagonalMask.from_seqlens([3, 0, 2], [0, 90, 110])},
    "soft cap": {"softcap": 2.0, "scale": 0.8},
    "dropout": {"p": 0.4, "seed": 9},
    "bias of keys": {"bias": (1, 0, 0, 1)},
    "bias of scores": {"bias": (1, 1, 1, 1), "mask": masks.LowerTriangularFromBottomRightMask()},
    "bias of heads": {"bias": (0, 1, 0, 0)},
    "128 features": {"B": 1, "K": 72, "E": 128},
    "extreme scores": {"spread": 300.0},
}  # fmt: skip


def case_of(device, **more):
    sizes = {"B": 2, "M": 5, "N": 200, "H": 4, "G": 2, "K": 8, "dtype": torch.float16}
    return make_case(**(sizes | more), device=device)


def run(case, launches):
    check_triton(case)
    assert len(launches) == 1


QUICK = (
    *("plain", "one query", "no shared heads", "causal from the top left", "window", "sequences"),
    *("bias of heads", "128 features"),
)


@pytest.mark.parametrize("name", all_extended_but(QUICK, CASES))
def test_values(device, launches, name):
    run(case_of(device, **CASES[name]), launches)


@pytest.mark.parametrize("name", ["plain", "causal", "dropout"])
def test_one_part(device, launches, monkeypatch, name):
    monkeypatch.setattr(few, "PROGRAMS", 1)
    run(case_of(device, **CASES[name]), launches)


def test_bool_mask(device, launches):
    case = case_of(device)
    shown = torch.rand(2, 1, 5, 200, device=device) < 0.4
    shown[1, :, 2] = False
    run(type(case)(case.query, case.key, case.value, shown), launches)


@pytest.mark.parametrize("how", ["every other", "unaligned", "reversed dimensions"])
def test_strides(device, launches, how):
    case = case_of(device, bias=(1, 1, 1, 1))
    check_triton(*laid_out(case, how))
    assert len(launches) == 1


def test_same_call_same_bits(device, launches):
    skip_unless_runnable("triton", device)
    case = case_of(device, **CASES["causal"], p=0.3, seed=5)
    first, second = (ours(case, backend="triton") for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(first, second))


@pytest.mark.parametrize(
    "more", [{"M": 33}, {"dtype": torch.float32}, {"K": 300}, {"B": 5, "H": 1, "G": 1}], ids=str
)
def test_other_calls(device, launches, more):
    """More rows than a tile, float32, many features, as many key heads as there are programs."""
    skip_unless_runnable("triton", device)
    ours(case_of(device, **more), backend="triton")
    assert not launches
