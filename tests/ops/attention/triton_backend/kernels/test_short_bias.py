"""The gradient of a bias of short problems, from scores that are computed again: through the
interpreter on the CPU, for real on a GPU. The same truth and budget as the other kernels have."""

from dataclasses import replace

import pytest
import torch

from lowtide import attn_bias as masks
from tests.ops.attention.helpers import (
    INTERPRETED,
    check,
    check_same_bits,
    check_triton,
    differentiate,
    laid_out,
    make_case,
    make_upstream,
    ours,
)
from tests.support.extended import all_extended_but
from tests.support.loss import skip_unless_runnable

pytest.importorskip("triton")
shared = pytest.importorskip("lowtide.ops.attention.triton_backend.launch_small_problems")

pytestmark = INTERPRETED


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """Gives what the launches so far returned, of runs as short as they can be."""
    monkeypatch.setattr(shared, "BIAS_PROGRAMS", 1 << 20)
    found = []
    launch = shared.short_bias_gradient

    def kept(call):
        found.append(launch(call))
        return found[-1]

    monkeypatch.setattr(shared, "short_bias_gradient", kept)
    return found


CASES = {
    "plain": {},
    "causal": {"mask": masks.LowerTriangularMask()},
    "local": {"mask": masks.LocalAttentionFromBottomRightMask(3, 2)},  # tiles that nobody sees
    "soft cap": {"softcap": 2.0, "scale": 0.8},
    "dropout": {"p": 0.4, "seed": 9},
    "shared key heads": {"H": 4, "G": 2, "E": 5},
    "many features": {"K": 50, "E": 64, "H": 1},
    "extreme scores": {"spread": 300.0},
    "negative scale": {"scale": -0.6},
    "one batch, heads share": {"B": 1, "bias": (0, 0, 1, 1), "mask": masks.LowerTriangularMask()},
    "own of each batch, heads share": {"bias": (1, 0, 1, 1), "H": 4, "G": 2, "softcap": 2.0},
}  # fmt: skip


def case_of(device, **more):
    """Makes a call whose transposed bias is no larger than its key, unless `more` changes that."""
    sizes = {"B": 3, "M": 70, "N": 75, "H": 2, "K": 24, "bias": (0, 1, 1, 1), "dtype": torch.float16}
    return make_case(**sizes | more, device=device)


def run(case, launches):
    check_triton(case)
    assert len(launches) == 1


QUICK = ("plain", "causal", "local", "many features", "one batch, heads share")


@pytest.mark.parametrize("name", all_extended_but(QUICK, CASES))
def test_values(device, launches, name):
    run(case_of(device, **CASES[name]), launches)


@pytest.mark.parametrize("programs", all_extended_but([1, 24], [1, 24, 1 << 20]))
@pytest.mark.parametrize("shape", [(0, 1, 1, 1), (0, 0, 1, 1), (1, 0, 1, 1)], ids=str)
def test_runs(device, launches, monkeypatch, shape, programs):
    """One run, some and as many as there are scores."""
    monkeypatch.setattr(shared, "BIAS_PROGRAMS", programs)
    run(case_of(device, bias=shape), launches)


@pytest.mark.extended
def test_parts_have_a_bound(device, launches, monkeypatch):
    """Beside the bias's gradient runs hold at most BIAS_PROGRAMS tiles, for any number of them."""
    skip_unless_runnable("triton", device)
    monkeypatch.setattr(shared, "BIAS_PROGRAMS", 6)
    new, most = torch.Tensor.new_empty, [0]

    def counted(tensor, *size, **options):
        made = new(tensor, *size, **options)
        if options.get("dtype") == torch.float32:
            most.append(made.nbytes)
        return made

    monkeypatch.setattr(torch.Tensor, "new_empty", counted)
    for B, shape in ((1, (0, 0, 1, 1)), (3, (1, 0, 1, 1)), (40, (0, 1, 1, 1))):
        case = case_of(device, B=B, M=64, N=64, bias=shape)
        differentiate(ours, case, make_upstream(case), backend="triton")
    assert 0 < max(most) <= 6 * 64 * 64 * 4
    assert len(launches) == 3


def test_bias_alone(device, launches):
    case = case_of(device)
    case.trained("bias")
    run(case, launches)
    assert launches == [None]


@pytest.mark.parametrize("M", [64, 70])
def test_transposed_bias(device, launches, M):
    """The kernel of dk and dv reads a copy [keys, queries], whose rows end with zeros."""
    case = case_of(device, M=M, N=37)
    check_triton(case)
    (transposed,) = launches
    assert transposed.shape == (1, 2, 37, 64 if M == 64 else 72)
    assert torch.equal(transposed[..., :M], case.bias.mT)
    assert not transposed[..., M:].any()


def test_large_bias_not_transposed(device, launches):
    check_triton(case_of(device, K=22))
    assert launches == [None]


@pytest.mark.parametrize(
    ("dtype", "M", "K", "is_transposed"),
    [(torch.float16, 65, 22, False), (torch.float32, 70, 24, False), (torch.float32, 70, 48, True)],
)
def test_transposed_bias_no_larger_than_gradient_of_key(device, launches, dtype, M, K, is_transposed):
    """In bytes, padding included; the bias may have wider numbers than query, key and value."""
    skip_unless_runnable("triton", device)
    case = case_of(device, M=M, N=37, K=K)
    upstream = make_upstream(case)
    wide = replace(case, bias=case.bias.detach().to(dtype).requires_grad_())
    found = differentiate(ours, wide, upstream, backend="triton")
    (transposed,) = launches
    assert (transposed is not None) == is_transposed
    assert transposed is None or transposed.nbytes <= found["key"].nbytes
    check(found | {"bias": found["bias"].to(case.bias.dtype)}, case, upstream)


@pytest.mark.parametrize("more", [{}, {"mask": masks.LowerTriangularMask(), "p": 0.4, "seed": 9}], ids=str)
def test_float32(device, launches, monkeypatch, more):
    """Where each problem has a program for its other gradients."""
    monkeypatch.setattr("lowtide.ops.attention.triton_backend.launch_backward.PROBLEMS", 1)
    run(case_of(device, dtype=torch.float32, **more), launches)


@pytest.mark.parametrize(
    "how",
    all_extended_but(
        ["unaligned", "expanded"], ["every other", "unaligned", "reversed dimensions", "expanded"]
    ),
)
def test_strides(device, launches, how):
    case = case_of(device, mask=masks.LowerTriangularMask())
    check_triton(*laid_out(case, how))
    assert len(launches) == 1


@pytest.mark.parametrize(
    "more",
    [
        {"B": 1},
        {"K": 65},
        {"bias": (1, 1, 1, 1)},
        {"bias": (0, 1, 0, 1)},
        pytest.param({"dtype": torch.float32}, marks=pytest.mark.extended),
    ],
    ids=str,
)
def test_other_ways(device, launches, monkeypatch, more):
    """Batches that share no bias, of more than a few scores; and what has no such kernel."""
    monkeypatch.setattr("lowtide.ops.attention.triton_backend.launch_backward.FEW_SCORES", 0)
    case = case_of(device, **more)
    check_triton(case)
    assert not launches


def test_same_call_same_bits(device):
    case = case_of(device, p=0.3, seed=5)
    check_same_bits(case)
