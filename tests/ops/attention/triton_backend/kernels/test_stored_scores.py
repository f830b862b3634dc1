"""Backward from gradients of scores that are kept, in strips of heads and of keys: through the
interpreter on the CPU, for real on a GPU. The room of a strip is made small, and is full of NaN at
first."""

import pytest
import torch

import lowtide
from lowtide import attn_bias as masks
from tests.ops.attention.helpers import (
    INTERPRETED,
    check_triton,
    differentiate,
    make_case,
    make_upstream,
    ours,
    peak_of_backward,
)
from tests.support.extended import all_extended_but
from tests.support.loss import skip_unless_runnable

pytest.importorskip("triton")
grad_scores = pytest.importorskip("lowtide.ops.attention.triton_backend.strips")
up = grad_scores.up
launch_backward = pytest.importorskip("lowtide.ops.attention.triton_backend.launch_backward")


pytestmark = INTERPRETED

ROOMS = ("one key head", "128 keys", "one batch and head")
CASES = {
    "plain": {"B": 2, "N": 300},
    "shared key heads": {"H": 4, "G": 2, "E": 5},
    "causal": {"N": 300, "mask": masks.LowerTriangularFromBottomRightMask()},
    "local": {"N": 300, "mask": masks.LocalAttentionFromBottomRightMask(3, 2)},  # strips that nobody sees
    "sequences": {"mask": masks.BlockDiagonalCausalMask.from_seqlens([3, 12, 5], [1, 80, 59])},
    "soft cap": {"softcap": 2.0, "scale": 0.8},
    "dropout": {"p": 0.4, "seed": 9},
    "bias of keys": {"bias": (0, 1, 0, 1)},
    "bias of queries": {"bias": (0, 1, 1, 0)},
    "bias [1, H, M, N]": {"bias": (0, 1, 1, 1), "mask": masks.LowerTriangularFromBottomRightMask()},
    "bias [1, 1, M, N]": {"bias": (0, 0, 1, 1)},
    "bias [B, 1, M, N]": {"B": 2, "bias": (1, 0, 1, 1), "H": 4, "G": 2},
    "bias [B, H, M, N]": {"B": 2, "bias": (1, 1, 1, 1)},
    "bias, soft cap": {"bias": (0, 1, 1, 1), "softcap": 3.0},
    "bias, everything": {
        "B": 2, "bias": (0, 1, 1, 1), "softcap": 3.0, "window": (100, 5), "p": 0.3, "seed": 4, "H": 4, "G": 2,
        "E": 5,
    },
    "dropout of batches": {"B": 2, "p": 0.4, "seed": 9, "H": 1},
    "bias of keys of batches": {"B": 2, "bias": (1, 1, 0, 1)},
    "many features": {"H": 1, "K": 150, "E": 270, "bias": (0, 1, 1, 1)},
    "many features, everything": {
        "B": 2, "bias": (0, 1, 1, 1), "softcap": 3.0, "window": (100, 5), "p": 0.3, "seed": 4, "H": 4, "G": 2,
        "K": 136,
    },
    "72 features": {"H": 4, "G": 2, "K": 72, "bias": (0, 1, 0, 1)},
    "72 features, long": {"H": 4, "G": 2, "K": 72, "bias": (0, 1, 1, 1)},
}  # fmt: skip


def case_of(name, device, **more):
    return make_case(**({"B": 1, "M": 20, "N": 140, "H": 2} | CASES[name] | more), device=device)


def counted(monkeypatch):
    """The strips of the last call."""
    found = []

    def strips(*given):
        found[:] = grad_scores.strips(*given)
        return found

    monkeypatch.setattr(launch_backward, "strips", strips)
    return found


@pytest.fixture(autouse=True)
def any_share(monkeypatch):
    """Sizes as small as these have room for a part of themselves alone."""
    monkeypatch.setattr(grad_scores, "SHARE", 1e6)
    monkeypatch.setattr(launch_backward, "FEW_SCORES", 0)  # whose bias has a kernel of its own


def room_of(room, case):
    """Bytes of a strip with all keys of one key head, in all batches or in one; or of 128 keys."""
    return (
        1
        if room == "128 keys"
        else of_head(case, case.key.shape[1]) * (len(case.query) if room == "one key head" else 1)
    )


def of_head(case, keys):
    """Bytes of a strip of one key head in one batch."""
    _, M, H, K = case.query.shape
    N, G, E = case.value.shape[1:]
    of_bias = case.bias is not None and min(case.bias.shape[2:]) > 1
    kept = (2 if of_bias and case.options.get("softcap") else 1) + stores_weights(max(K, E))
    operands = 3 * 2 * (H // G * M + N) * (up(K, 16) + up(E, 16))
    return kept * (H // G) * up(M, 16) * up(keys, 128) * 4 + operands


def stores_weights(features):
    """Return True if float32, without TF32, stores the weights of so many features."""
    return features > (64 if launch_backward.MOST_POSITIONS else 128)


SHARED_BATCHES = (
    *("bias [1, H, M, N]", "bias [1, 1, M, N]", "bias, soft cap", "bias, everything"),
    "many features, everything",
)
WHOLE_HEADS = ("plain", "shared key heads", "bias [1, H, M, N]", "bias, everything", "many features")


OF_BATCHES = (
    "plain",
    "bias [B, H, M, N]",
    "bias, everything",
    "dropout of batches",
    "bias of keys of batches",
)


VALUES = [
    *((name, ROOMS[0]) for name in WHOLE_HEADS),
    *((name, ROOMS[1]) for name in CASES),
    *((name, ROOMS[2]) for name in OF_BATCHES),
]
# Each case in one room, that of one key head where it has several.
ONCE = dict([*VALUES[len(WHOLE_HEADS) :], *VALUES[: len(WHOLE_HEADS)]])
SLOW = (
    *("many features", "many features, everything", "bias, everything"),
    *("bias [B, 1, M, N]", "bias [B, H, M, N]", "shared key heads"),
)
QUICK = [(name, room) for name, room in ONCE.items() if name not in SLOW]


@pytest.mark.parametrize(("name", "room"), all_extended_but(QUICK, VALUES))
def test_values(device, monkeypatch, name, room):
    case = case_of(name, device)
    if name.endswith("long"):  # its scores are recomputed by the kernel of dv
        monkeypatch.setattr(launch_backward, "MOST_POSITIONS", 0)
    monkeypatch.setattr(grad_scores, "ROOM", room_of(room, case))
    found = counted(monkeypatch)
    check_triton(case)
    shared_heads = name in ("bias [1, 1, M, N]", "bias [B, 1, M, N]")
    shared_batches = name in SHARED_BATCHES
    every = (len(case.query) if shared_batches else 1) * (case.key.shape[2] if shared_heads else 1)
    if every * of_head(case, 128) > grad_scores.ROOM:  # too many pieces: the bias's gradient is added up
        shared_heads = shared_batches = False
    cut = {"one key head": shared_heads, "one batch and head": shared_batches, "128 keys": True}[room]
    strips_of_keys = -(-case.key.shape[1] // 128) if cut else 1
    batches = 1 if room == "one key head" or shared_batches else len(case.query)
    assert len(found) == strips_of_keys * batches * (1 if shared_heads else case.key.shape[2])


@pytest.mark.parametrize("name", all_extended_but(["bias [1, H, M, N]"], ["plain", "bias [1, H, M, N]"]))
def test_same_call_same_bits(device, monkeypatch, name):
    """In any room; but the query's gradient is summed over strips of keys, in their order."""
    skip_unless_runnable("triton", device)
    case = case_of(name, device)
    upstream = make_upstream(case)
    first = differentiate(ours, case, upstream, backend="triton")
    for room in (grad_scores.ROOM, room_of("one key head", case), 1):
        monkeypatch.setattr(grad_scores, "ROOM", room)
        found = differentiate(ours, case, upstream, backend="triton")
        for part in first.keys() - ({"query"} if room == 1 else set()):
            assert torch.equal(found[part], first[part]), part


@pytest.mark.parametrize(
    "name",
    all_extended_but(
        ["bias [1, H, M, N]", "bias [B, 1, M, N]"],
        ["bias [1, H, M, N]", "bias [B, 1, M, N]", "bias, everything"],
    ),
)
def test_float16(device, monkeypatch, name):
    monkeypatch.setattr(grad_scores, "ROOM", 1)
    case = case_of(name, device, dtype=torch.float16, B=2)  # with one head, no heads share the bias
    check_triton(case)


@pytest.mark.parametrize("room", ROOMS[:2])
@pytest.mark.parametrize("K", [32, 72])
@pytest.mark.parametrize("M", all_extended_but([100], [100, 200]))
def test_memory(device, monkeypatch, M, K, room):
    """Of float32: a strip, its operands in three pieces, and rows; where strips are of some keys
    the query's gradient is its own sum. All of it linear in M."""
    case = make_case(1, M, 140, 4, 2, K=K, device=device)
    monkeypatch.setattr(grad_scores, "ROOM", room_of(room, case))
    peak, gradients = peak_of_backward(case)
    scores = 2 * up(M, 16) * (256 if room == "one key head" else 128) * 4 * (1 + stores_weights(K))
    pieces = 3 * 2 * (2 * M + 140) * 2 * up(K, 16)
    assert peak.largest <= max(scores, case.query.nbytes)
    assert peak.bytes <= gradients + scores + pieces + 2 * 4 * 4 * M + (16 << 10)


def test_memory_of_pieces_if_scores_are_computed_again(device, monkeypatch):
    """Of float32, some heads at a time: only what the kernel's loop reads, of one group."""
    monkeypatch.setattr(launch_backward, "_leaves_idle", lambda *_: True)
    monkeypatch.setattr(launch_backward, "FEWEST_PROGRAMS", 1)
    case = make_case(1, 140, 140, 6, K=32, device=device)
    peak, gradients = peak_of_backward(case)
    pieces = 3 * 2 * (140 + 140) * 32
    assert peak.bytes <= gradients + pieces + 3 * 4 * 6 * 140 + (8 << 10)


WANTED = [("query", "bias"), ("key", "bias"), ("value", "bias"), ("bias",), ("query", "value"), ("query",)]


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("wanted", [*WANTED, ("value",)], ids=" and ".join)
@pytest.mark.parametrize("K", [8, 72])
def test_gradients_of_subset(device, monkeypatch, wanted, softcap, K):
    monkeypatch.setattr(grad_scores, "ROOM", 1)
    case = case_of("bias [1, H, M, N]", device, softcap=softcap, K=K)
    case.trained(*wanted)
    check_triton(case)


@pytest.mark.parametrize("K", [32, 72])
def test_gradient_of_bias_of_keys_alone(device, K):
    case = case_of("bias of keys", device, K=K)
    case.trained("bias")
    check_triton(case)


def test_bias_gradient_summed_in_float32(device, monkeypatch):
    """And rounded once, whether its heads are together in a strip or not."""
    skip_unless_runnable("triton", device)
    case = case_of("bias [1, 1, M, N]", device)
    bias = case.bias.detach().bfloat16().requires_grad_()

    def gradient():
        tensors = [each.detach() for each in (case.query, case.key, case.value)]
        out = lowtide.memory_efficient_attention(*tensors, bias, backend="triton")
        return torch.autograd.grad(out.double().square().sum(), bias)[0]

    together = gradient()
    monkeypatch.setattr(grad_scores, "ROOM", 1)
    found = counted(monkeypatch)
    apart = gradient()
    assert {strip.groups for strip in found} == {1}
    wide = bias.detach().double().requires_grad_()
    exact_out = lowtide.memory_efficient_attention(
        *(each.detach().double() for each in (case.query, case.key, case.value)), wide, backend="reference"
    )
    (exact,) = torch.autograd.grad(exact_out.square().sum(), wide)
    for got in (together, apart):
        assert got.dtype == torch.bfloat16
        # The interpreter truncates: twice the rounding.
        assert ((got.double() - exact).abs() <= 2**-7 * exact.abs() + 1e-6 * exact.norm()).all()
