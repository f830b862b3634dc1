"""Many small problems, of one tile of scores each: through the interpreter on the CPU, or on a GPU.
The same truth and budget as the other kernels have."""

import pytest
import torch

from lowtide import attn_bias as masks
from tests.ops.attention.helpers import (
    INTERPRETED,
    check,
    check_same_bits,
    check_triton,
    dense,
    differentiate,
    laid_out,
    make_case,
    make_upstream,
    ours,
)
from tests.support.budgets import norm
from tests.support.loss import skip_unless_runnable

pytest.importorskip("triton")
small = pytest.importorskip("lowtide.ops.attention.triton_backend.launch_small_problems")

pytestmark = INTERPRETED


@pytest.fixture(autouse=True)
def runs(monkeypatch):
    """Any number of problems is many, and takes runs of several batches. Gives its launches."""
    monkeypatch.setattr(small, "FEWEST_PROBLEMS", 1)
    for name in ("FORWARD_PROGRAMS", "BACKWARD_PROGRAMS"):
        monkeypatch.setattr(small, name, 4)
    found = {"forward": 0, "backward": 0}
    for name in found:
        launch = getattr(small, name)

        def counted(*given, name=name, launch=launch):
            found[name] += 1
            return launch(*given)

        monkeypatch.setattr(small, name, counted)
    return found


CASES = {
    "plain": {},
    "one query": {"M": 1, "N": 60},
    "one key": {"M": 50, "N": 1},
    "one feature": {"K": 1, "E": 3},
    "many features": {"K": 50, "E": 64},
    "whole tile": {"M": 64, "N": 64, "K": 64},
    "causal": {"M": 50, "N": 50, "mask": masks.LowerTriangularMask()},
    "more queries than keys": {"M": 60, "mask": masks.LowerTriangularFromBottomRightMask()},
    "local": {"mask": masks.LocalAttentionFromBottomRightMask(3, 2)},
    "sequences": {"B": 1, "M": 60, "N": 63, "mask": masks.BlockDiagonalMask.from_seqlens([3, 57], [1, 62])},
    "soft cap": {"softcap": 2.0, "scale": 0.8},
    "dropout": {"p": 0.4, "seed": 9},
    "extreme scores": {"spread": 300.0},
    "negative scale": {"scale": -0.6, "bias": (0, 1, 1, 1)},
}  # fmt: skip
BIASES = [(0, 1, 1, 1), (1, 1, 1, 1), (0, 0, 1, 1)]
EVERYTHING = {"softcap": 3.0, "window": (20, 5), "p": 0.3, "seed": 4, "E": 5}


def case_of(device, **more):
    return make_case(**({"B": 5, "M": 37, "N": 41, "H": 2} | more), device=device)


def run(case, runs, backward=1):
    check_triton(case)
    assert runs == {"forward": 1, "backward": backward}


@pytest.mark.parametrize("name", CASES)
def test_values(device, runs, name):
    run(case_of(device, **CASES[name]), runs)


@pytest.mark.parametrize("shape", BIASES, ids=str)
@pytest.mark.parametrize("more", [{}, EVERYTHING], ids=["alone", "with everything"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_bias(device, runs, shape, more, dtype):
    run(case_of(device, bias=shape, dtype=dtype, **more), runs)


WIDE = {
    "plain": {"N": 128, "K": 40},
    "own bias": {"bias": (1, 1, 1, 1)},
    "shared bias, everything": {"bias": (0, 1, 1, 1), "M": 32, **EVERYTHING},
    "local": {"M": 30, "mask": masks.LocalAttentionFromBottomRightMask(9, 2), "bias": (1, 1, 1, 1)},
}


@pytest.mark.parametrize("name", WIDE)
def test_few_queries_of_many_keys(device, runs, name):
    """Backward has a tile for them, in half precision."""
    case = case_of(device, **({"M": 21, "N": 101, "dtype": torch.float16} | WIDE[name]))
    check_triton(case)
    assert runs == {"forward": 0, "backward": 1}


@pytest.mark.parametrize(
    "shape",
    [
        *((1, 0, 1, 1), (0, 0, 0, 0)),
        *(
            pytest.param(each, marks=pytest.mark.extended)
            for each in ((0, 1, 0, 1), (1, 0, 0, 1), (1, 0, 1, 0))
        ),
    ],
    ids=str,
)
def test_other_biases(device, runs, shape):
    """Their gradients have other ways; without one, the call is as any other."""
    case = case_of(device, bias=shape)
    run(case, runs, backward=0)
    case.bias.requires_grad_(False)
    runs["forward"] = 0
    run(case, runs)


@pytest.mark.parametrize("shape", [(5, 1, 37, 41), (1, 2, 37, 41), (5, 1, 1, 41)], ids=str)
def test_bool_mask(device, runs, shape):
    case = case_of(device)
    shown = torch.rand(shape, device=device) < 0.4
    if shape[2] > 1:
        shown[0, :, 5:9] = False
    run(type(case)(case.query, case.key, case.value, shown), runs)


def test_mask_of_lowest_numbers(device, runs):
    """As old BERT makes it: of a row that attends to nothing else the weights sum to 1."""
    case = case_of(device, bias=(1, 1, 1, 1))
    with torch.no_grad():
        case.bias[:, :, :, 30:] = -1e9
        case.bias[:, :, 7] = torch.finfo(torch.float32).min
    run(case, runs)


@pytest.mark.parametrize("only", ["query", "key", "value", "bias"])
def test_gradient_of_one_operand(device, runs, only):
    case = case_of(device, bias=(0, 1, 1, 1), p=0.3, seed=1)
    case.trained(only)
    run(case, runs)


@pytest.mark.parametrize("place", [0, 1])
def test_upstream_of_one_output(device, runs, place):
    case = case_of(device, bias=(0, 1, 1, 1))
    upstream = tuple(each if at == place else None for at, each in enumerate(make_upstream(case)))
    check_triton(case, upstream)
    assert runs["backward"] == 1


@pytest.mark.parametrize("how", ["every other", "unaligned", "reversed dimensions", "expanded"])
def test_strides(device, runs, how):
    case = case_of(device, bias=(1, 1, 1, 1), mask=masks.LowerTriangularFromBottomRightMask())
    check_triton(*laid_out(case, how))
    assert runs["backward"] == 1


@pytest.mark.parametrize("sizes", [{"M": 0}, {"N": 0}, {"E": 0}, {"K": 0}], ids=str)
def test_nothing(device, runs, sizes):
    case = case_of(device, bias=(0, 1, 1, 1), **sizes)
    check_triton(case)
    assert runs["forward"] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("fewest", [(1, 1 << 30), (1 << 30, 1)], ids=["forward", "backward"])
def test_other_kernels_take_the_rest(device, runs, monkeypatch, dtype, fewest):
    """Forward alone, or backward alone: each gives the other what it reads."""
    skip_unless_runnable("triton", device)
    case = case_of(device, bias=(1, 1, 1, 1), dtype=dtype)
    upstream = make_upstream(case)

    def halves(case, **options):
        monkeypatch.setattr(small, "FEWEST_PROBLEMS", fewest[0])
        found = ours(case, **options)
        monkeypatch.setattr(small, "FEWEST_PROBLEMS", fewest[1])
        return found

    check(differentiate(halves, case, upstream, backend="triton"), case, upstream)
    assert runs == {"forward": int(fewest[0] == 1), "backward": int(fewest[1] == 1)}


def test_low_half(device, monkeypatch):
    """Of a row with one key nothing is rounded but the result: the low half has what it lost."""
    skip_unless_runnable("triton", device)
    written = []
    launch = small.forward
    monkeypatch.setattr(small, "forward", lambda *given: (written.append(given[1:3]), launch(*given)))
    case = case_of(device, M=30, N=30, mask=masks.LowerTriangularMask(), p=0.4, seed=9, dtype=torch.float16)
    ours(case, backend="triton")
    [(out, low)] = written
    exact = dense(case.to(torch.float64))[0].transpose(1, 2)[:, :, 0]
    out, low = out.double()[:, :, 0], low.double()[:, :, 0]
    assert norm(out - exact) > 1e-4 * norm(exact)
    assert norm(out + low - exact) < 1e-6 * norm(exact)


TOO_LARGE = {"queries": {"M": 65}, "keys": {"N": 65}, "features": {"K": 65}, "key heads": {"G": 1}}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_other_kernels_take(device, runs, name):
    case = case_of(device, B=1, **TOO_LARGE[name])
    check_triton(case)
    assert runs == {"forward": 0, "backward": 0}


def test_same_call_same_bits(device):
    case = case_of(device, bias=(0, 1, 1, 1), p=0.3, seed=5)
    check_same_bits(case)
