"""Many short problems, each in one program: through the interpreter on the CPU, for real on a GPU.
The same truth and budget as the other kernels have."""

import pytest
import torch

from lowtide import attn_bias as masks
from tests.ops.attention.helpers import INTERPRETED, check_same_bits, check_triton, laid_out, make_case

pytest.importorskip("triton")
launch_backward = pytest.importorskip("lowtide.ops.attention.triton_backend.launch_backward")

pytestmark = INTERPRETED


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """Any number of problems is many. Gives the number of launches."""
    monkeypatch.setattr(launch_backward, "PROBLEMS", 1)
    found = []
    launch_recomputed = launch_backward.launch_recomputed
    launch = launch_recomputed.whole_problems
    monkeypatch.setattr(launch_recomputed, "whole_problems", lambda call: found.append(launch(call)))
    return found


CASES = {
    "plain": {},
    "whole tiles": {"M": 128, "N": 128},
    "causal": {"mask": masks.LowerTriangularMask()},
    "more queries than keys": {"M": 150, "mask": masks.LowerTriangularFromBottomRightMask()},
    "local": {"N": 150, "mask": masks.LocalAttentionFromBottomRightMask(3, 2)},  # tiles that nobody sees
    "sequences": {"B": 1, "mask": masks.BlockDiagonalMask.from_seqlens([3, 67], [70, 5])},
    "soft cap": {"softcap": 2.0, "scale": 0.8},
    "dropout": {"p": 0.4, "seed": 9},
    "bias of all scores": {"bias": (0, 1, 1, 1)},
    "bias with everything": {
        "bias": (0, 1, 1, 1), "softcap": 3.0, "window": (20, 5), "p": 0.3, "seed": 4, "E": 5,
    },
    "more features": {"K": 20, "E": 32},
    "extreme scores": {"spread": 300.0},
    "negative scale": {"scale": -0.6},
}  # fmt: skip


def case_of(device, **more):
    return make_case(**({"B": 2, "M": 70, "N": 75, "H": 1} | more), device=device)


def run(case, launches):
    check_triton(case)
    assert len(launches) == 1


@pytest.mark.parametrize("name", CASES)
def test_values(device, launches, name):
    run(case_of(device, **CASES[name]), launches)


@pytest.mark.parametrize("only", ["query", "key", "value"])
def test_gradients_of_some_operands(device, launches, only):
    """Where the query's is not asked for, other kernels take the call."""
    case = case_of(device)
    case.trained("query", only)
    run(case, launches)
    case.query.requires_grad_(False)
    if only != "query":
        check_triton(case)
        assert len(launches) == 1


@pytest.mark.parametrize("how", ["every other", "unaligned", "reversed dimensions", "expanded"])
def test_strides(device, launches, how):
    case = case_of(device, mask=masks.LowerTriangularMask())
    check_triton(*laid_out(case, how))
    assert len(launches) == 1


@pytest.mark.parametrize(
    "more",
    [{"H": 2, "G": 1}, {"K": 33}, {"bias": (0, 1, 0, 1)}, {"bias": (1, 1, 1, 1)}, {"dtype": torch.float16}],
    ids=str,
)
def test_other_ways(device, launches, more):
    case = case_of(device, **more)
    check_triton(case)
    assert not launches


def test_same_call_same_bits(device):
    case = case_of(device, p=0.3, seed=5)
    check_same_bits(case)
