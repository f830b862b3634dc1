"""No tensor of M x N, ever; and linear in M. On CUDA float32's backward keeps the scores of as many
heads and keys as there is room for (strips.py): here for the fewest, but where a test asks how much
room that is.
"""

import functools
import importlib.util

import pytest
import torch

import lowtide
from lowtide import attn_bias as masks
from lowtide.memory import peak_memory
from tests.conftest import NEEDS_CUDA
from tests.ops.attention.helpers import make_case
from tests.support.extended import all_extended_but

M, H, K = 2048, 2, 16
MODES = {
    "plain": {},
    "causal": {"mask": masks.LowerTriangularMask()},
    "window": {"window": (100, 0)},
    "bias of keys": {"bias": (0, 1, 0, 1)},
    "bias of queries": {"bias": (0, 1, 1, 0)},
    "dropout": {"p": 0.1, "seed": 3},
    "shared key heads": {"G": 1},
    "values of other features": {"E": 24},
    "soft cap": {"softcap": 5.0},
}


@pytest.fixture(autouse=True)
def room(monkeypatch):
    """Gives a strip room for the fewest keys only, 128 of one key head. Returns the constant."""
    if importlib.util.find_spec("triton") is None:
        return None
    from lowtide.ops.attention.triton_backend import launch_backward, strips

    whole = strips.ROOM
    monkeypatch.setattr(strips, "ROOM", 1)
    monkeypatch.setattr(launch_backward, "FEW_SCORES", 0)  # whose bias has a kernel of its own
    return whole


def step(case, backend="auto", gradients=True, **options):
    """Asks for the result alone, so that "auto" may choose any backend."""
    out = lowtide.memory_efficient_attention(
        case.query, case.key, case.value, case.attn_bias, **case.options, backend=backend
    )
    if gradients:
        torch.autograd.grad(out, list(case.leaves().values()), torch.ones_like(out))
    return out


def peak_of(device, run):
    if device != "cpu":
        run()  # allocate what a process allocates once: cuBLAS's workspace, and kernels
    with peak_memory(device) as peak:
        run()
    return peak


def of_length(length, mode, device):
    return make_case(1, length, length, H, K=K, device=device, **MODES[mode])


@functools.cache
def peak_of_length(length, mode, device, room):
    case = of_length(length, mode, device)
    return peak_of(device, lambda: step(case)), held(case), a_tenth_of_dense(case)


def held(case):
    """The bytes of the result, its upstream gradient, the gradients, and what is saved of a row:
    the logsumexp, dropout's key, the interval of a mask."""
    M = case.query.shape[1]
    return 2 * case.query.nbytes + sum(leaf.nbytes for leaf in case.leaves().values()) + 32 * H * M


def scores(case):
    return case.query.shape[1] * case.key.shape[1] * case.query.element_size()


TILES = 16 << 20  # a handful of tiles of 1 MiB, and of sums of keys


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_score_tensor(device, mode, dtype):
    case = make_case(1, M, M, H, K=K, dtype=dtype, device=device, **MODES[mode])
    peak = peak_of(device, lambda: step(case))
    assert peak.largest < M * M * dtype.itemsize / 2
    assert peak.bytes <= held(case) + TILES


def test_no_score_tensor_fails_on_dense(device):
    case = of_length(M, "dropout", device)
    peak = peak_of(device, lambda: step(case, "reference"))
    assert peak.largest >= scores(case)
    assert peak.bytes > held(case) + TILES


QUICK = [name for name in MODES if name not in ("soft cap", "dropout", "values of other features")]


@pytest.mark.parametrize("mode", all_extended_but(QUICK, MODES))
def test_memory_linear(device, mode):
    room = "fewest" if device != "cpu" else None  # a CPU has none
    once, twice = (peak_of_length(length, mode, device, room)[0] for length in (M, 2 * M))
    assert twice.bytes <= 2.1 * once.bytes
    assert twice.largest <= 2.1 * once.largest


def a_tenth_of_dense(case):
    """A tenth of what the leanest dense computation holds beyond inputs, results and gradients:
    three matrices in the operands' dtype, of weights, their gradients and those of the scores."""
    B, _, H, _ = case.query.shape
    return 3 * B * H * scores(case) / 10


@pytest.mark.parametrize("mode", all_extended_but(QUICK, MODES))
def test_memory_tenth_of_dense(device, mode, room, monkeypatch):
    """At M = 4096, with all the room that there is."""
    if room is not None:
        monkeypatch.setattr("lowtide.ops.attention.triton_backend.strips.ROOM", room)
    peak, kept, most = peak_of_length(2 * M, mode, device, room if device != "cpu" else None)
    assert peak.bytes - kept <= most


KEPT = {
    **MODES,
    "bias of all scores": {"bias": (0, 1, 1, 1), "H": 4},
    "bias of all scores and heads": {"bias": (1, 0, 1, 1), "H": 4, "B": 2},
    "bias of all scores, soft cap": {"bias": (0, 1, 1, 1), "H": 4, "softcap": 5.0},
    "many features": {"K": 264, "H": 4, "mask": masks.LowerTriangularMask()},
    "many features, shared key heads": {"K": 512, "H": 8, "G": 2},
}


@pytest.mark.gpu
@NEEDS_CUDA
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", KEPT)
def test_memory_tenth_of_dense_with_stored_scores(mode, dtype, room, monkeypatch):
    monkeypatch.setattr("lowtide.ops.attention.triton_backend.strips.ROOM", room)
    sizes = {"B": 1, "M": 4096, "N": 4096, "H": H, "K": K} | KEPT[mode]
    case = make_case(**sizes, dtype=dtype, device="cuda")
    peak = peak_of("cuda", lambda: step(case))
    assert peak.bytes - held(case) <= a_tenth_of_dense(case)


@pytest.mark.extended
def test_memory_of_dense_not_lower(device):
    case = of_length(4096, "plain", device)
    peak = peak_of(device, lambda: step(case, "reference"))
    assert peak.bytes - held(case) >= 10 * a_tenth_of_dense(case)


@pytest.mark.parametrize("mode", MODES)
def test_no_grad_saves_nothing(device, mode):
    case = of_length(M, mode, device)
    with torch.no_grad():
        peak = peak_of(device, lambda: step(case, "torch", gradients=False))
        out = step(case, "torch", gradients=False)
        with peak_memory(device) as kept:
            again = step(case, "torch", gradients=False)
    assert peak.bytes <= out.nbytes + 32 * H * M + TILES
    assert again.shape == out.shape
    assert kept.largest < scores(case)


def test_bias_gradient_memory(device):
    """[1, H, 1, N]: not [B, H, M, N], in any precision."""
    case = make_case(4, M, M, H, K=K, bias=(0, 1, 0, 1), device=device)
    for leaf in (case.query, case.key, case.value):
        leaf.requires_grad_(False)
    peak = peak_of(device, lambda: step(case))
    assert peak.bytes <= 2 * case.query.nbytes + 4 * 32 * H * M + TILES


@pytest.mark.parametrize("mode", all_extended_but(["plain"], ["plain", "dropout", "bias of keys"]))
def test_second_derivative_memory(device, mode, monkeypatch):
    from lowtide.ops.attention.operator import higher_order

    monkeypatch.setattr(higher_order, "WORKSPACE", 4 << 20)
    case = make_case(1, 1024, 1024, H, K=4, device=device, **MODES[mode])

    def run():
        leaves = list(case.leaves().values())
        out = lowtide.memory_efficient_attention(
            case.query, case.key, case.value, case.attn_bias, **case.options
        )
        first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        torch.autograd.grad(sum(part.square().sum() for part in first), leaves)

    peak = peak_of(device, run)
    assert peak.largest < 1024 * 1024 * 4
    assert peak.bytes < 2 * 1024 * 1024 * 4 * 2


@pytest.mark.parametrize("mode", ["plain", "causal", "shared key heads"])
@pytest.mark.parametrize(("length", "part"), [(16384, 10), (32768, 40)])
def test_workspace_constant(device, monkeypatch, room, mode, length, part):
    """A tenth of all scores, a fortieth at twice the size; float32's pieces are in it."""
    if device == "cpu":
        pytest.skip("only the Triton kernels keep scores, and the interpreter has no time for so many")
    from lowtide.ops.attention.triton_backend import strips

    monkeypatch.setattr(strips, "ROOM", room)
    case = make_case(1, length, length, 3, K=K, device=device, **MODES[mode])
    peak = peak_of(device, lambda: step(case))
    assert peak.largest <= room
    assert peak.bytes <= held(case) + room + TILES
    assert peak.bytes - held(case) <= length * length * 3 * 4 / part
