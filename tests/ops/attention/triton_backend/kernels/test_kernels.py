"""The Triton kernels: through the interpreter on the CPU, for real on a GPU. The same truth and
budget as the engine in plain torch has."""

import pytest
import torch

import lowtide
from lowtide import attn_bias as masks
from tests.ops.attention.helpers import (
    INTERPRETED,
    check_same_bits,
    check_triton,
    dense,
    differentiate,
    laid_out,
    make_case,
    make_upstream,
    ours,
)
from tests.support.extended import all_extended_but
from tests.support.loss import norm, skip_unless_runnable

triton = pytest.importorskip("triton")
bf16_split = pytest.importorskip("lowtide.ops.attention.triton_backend.kernels.bf16_split")

pytestmark = INTERPRETED

CASES = {
    "plain": {},
    "one query": {"M": 1, "N": 70},
    "one key": {"M": 70, "N": 1},
    "one feature": {"K": 1, "E": 3},
    "shared key heads": {"H": 6, "G": 2, "E": 5},
    "causal": {"M": 70, "N": 70, "mask": masks.LowerTriangularMask()},
    "more queries than keys": {"M": 80, "N": 41, "mask": masks.LowerTriangularFromBottomRightMask()},
    "local": {"M": 61, "N": 80, "mask": masks.LocalAttentionFromBottomRightMask(3, 2)},
    "sequences": {
        "B": 1,
        "M": 100,
        "N": 104,
        "mask": masks.BlockDiagonalMask.from_seqlens([3, 57, 40], [1, 60, 43]),
    },
    "causal sequences": {"M": 70, "N": 70, "mask": masks.BlockDiagonalCausalMask.from_seqlens([5, 0, 65])},
    "soft cap": {"softcap": 2.0, "scale": 0.8},
    "dropout": {"p": 0.4, "seed": 9},
    "features in several blocks": {"B": 1, "M": 20, "N": 37, "H": 2, "G": 1, "K": 150, "E": 270},
    "two blocks of features, a bias of queries": {
        "B": 1,
        "M": 20,
        "N": 37,
        "H": 2,
        "K": 150,
        "E": 140,
        "bias": (0, 0, 1, 1),
    },
    "more features than most": {"B": 1, "M": 9, "N": 20, "H": 2, "K": 600, "E": 520},
    "extreme scores": {"spread": 300.0},
}  # fmt: skip
BIASES = [(0, 0, 0, 0), (0, 1, 0, 1), (1, 0, 0, 1), (1, 0, 1, 0), (0, 1, 1, 1), (1, 1, 1, 1)]
EVERYTHING = {"softcap": 3.0, "window": (20, 5), "p": 0.3, "seed": 4, "G": 1, "E": 5}


SLOW = ("more features than most", "features in several blocks")


@pytest.mark.parametrize("name", all_extended_but([name for name in CASES if name not in SLOW], CASES))
def test_values(device, name):
    check_triton(make_case(**({"B": 1, "H": 2} | CASES[name]), device=device))


@pytest.mark.parametrize("shape", BIASES, ids=str)
@pytest.mark.parametrize("more", [{}, EVERYTHING], ids=["alone", "with everything"])
def test_bias(device, shape, more):
    check_triton(make_case(2, 37, 41, 2, bias=shape, device=device, **more))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(device, dtype):
    check_triton(make_case(1, 67, 70, 4, 2, 40, 24, bias=(0, 1, 0, 1), dtype=dtype, device=device))


@pytest.mark.parametrize("only", ["query", "key", "value", "bias"])
def test_gradient_of_one_operand(device, only):
    case = make_case(1, bias=(0, 1, 0, 1), p=0.3, seed=1, device=device)
    case.trained(only)
    check_triton(case)


@pytest.mark.parametrize("place", [0, 1])
def test_upstream_of_one_output(device, place):
    case = make_case(1, bias=(0, 1, 0, 1), device=device)
    upstream = tuple(each if at == place else None for at, each in enumerate(make_upstream(case)))
    check_triton(case, upstream)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_bias_of_one_number_per_head(device, dtype):
    """It moves all scores of a row alike, so only the logsumexp has a gradient for it. As a sum of
    gradients of scores it would be 1e-4 off in TF32, and 2e-3 in float16."""
    case = make_case(2, 40, 50, 2, bias=(0, 1, 0, 0), dtype=dtype, device=device).trained("bias")
    of_out, of_lse = make_upstream(case)
    check_triton(case, (of_out, of_lse))
    of_lse = of_lse * 0 + 0.5
    for upstream, want in ((None, 0.0), (of_lse, 2 * 40 * 0.5)):
        found = differentiate(ours, case, (of_out, upstream), backend="triton")["bias"]
        assert torch.equal(found, torch.full_like(found, want))


@pytest.mark.parametrize("shape", [(2, 1, 37, 41), (1, 1, 1, 41)], ids=str)
def test_bool_mask(device, shape):
    case = make_case(2, 37, 41, device=device)
    shown = torch.rand(shape, device=device) < 0.4
    if shape[2] > 1:
        shown[1, :, 5:9] = False
    check_triton(type(case)(case.query, case.key, case.value, shown))


def padding(name, N, device):
    """Which keys each of two batches, or each head, shows: [2 or 1, 2 or 1, 1, N]."""
    j = torch.arange(N, device=device)
    valid = torch.tensor([N // 2, 3], device=device)
    return {
        "right": j < valid[:, None, None, None],
        "left": j >= N - valid[:, None, None, None],
        "in the middle": ((j < 20) | (j >= 130))[None, None, None],
        "both sides, of a head": ((j > 65) & (j < 71))[None] | (valid == 3)[None, :, None, None],
        "all of a batch": (j < N - 9) & (valid == 3)[:, None, None, None],
        "nothing": (j < N)[None, None, None],
    }[name]


PADDING = ["right", "left", "in the middle", "both sides, of a head", "all of a batch", "nothing"]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float16) for name in PADDING),
        pytest.param("right", torch.float32, marks=pytest.mark.extended),
    ],
)
def test_padded_keys(device, name, dtype):
    """Tiles without a key that is shown are left out."""
    mask = masks.LocalAttentionFromBottomRightMask(90, 40) if name == "right" else None
    case = make_case(2, 66, 150, 2, G=1 if name == "left" else 2, dtype=dtype, device=device)
    check_triton(type(case)(case.query, case.key, case.value, padding(name, 150, device), mask))


def test_padded_keys_are_not_read(device):
    """In whole tiles of padding: infinities there stay out of the result and of the gradients."""
    skip_unless_runnable("triton", device)
    case = make_case(1, 70, 256, 2, dtype=torch.float16, device=device)
    shown = torch.arange(256, device=device)[None, None, None] < 128
    leaves = [leaf.detach().clone() for leaf in (case.query, case.key, case.value)]
    for leaf in leaves[1:]:
        leaf[:, 128:] = torch.inf
    out = lowtide.memory_efficient_attention(
        *(leaf.requires_grad_() for leaf in leaves), shown, backend="triton"
    )
    assert all(each.isfinite().all() for each in (out, *torch.autograd.grad(out.sum(), leaves)))


@pytest.mark.parametrize(
    "how",
    all_extended_but(
        ["every other", "reversed dimensions"],
        ["every other", "unaligned", "reversed dimensions", "expanded"],
    ),
)
def test_strides(device, how):
    case = make_case(2, 33, 45, 4, 2, bias=(1, 1, 1, 1), device=device, mask=masks.LowerTriangularMask())
    check_triton(*laid_out(case, how))


@pytest.mark.parametrize(("B", "M", "N", "H"), [(0, 3, 4, 2), (2, 0, 4, 2), (2, 3, 0, 2), (2, 3, 4, 0)])
def test_empty(device, B, M, N, H):
    skip_unless_runnable("triton", device)
    case = make_case(B, M, N, H, bias=(0, 1, 0, 1), mask=masks.LowerTriangularMask(), device=device)
    found = differentiate(ours, case, make_upstream(case), backend="triton")
    assert (found["logsumexp"] == -torch.inf).all()
    assert all((found[name] == 0).all() for name in ("out", "query", "key", "value", "bias"))


def test_dropout_same_scores(device):
    """As in plain torch, bit for bit: of one key each, a row is all there or 0."""
    skip_unless_runnable("triton", device)
    query, key = torch.zeros(2, 40, 3, 4, device=device), torch.zeros(2, 50, 3, 4, device=device)
    value = torch.eye(50, device=device)[None, :, None].expand(2, 50, 3, 50)
    ours, theirs = (
        lowtide.memory_efficient_attention(query, key, value, p=0.5, seed=21, backend=backend) != 0
        for backend in ("triton", "torch")
    )
    assert torch.equal(ours, theirs)
    assert 0.45 < ours.float().mean() < 0.55


def test_same_call_same_bits(device):
    case = make_case(1, 40, 70, 2, 1, bias=(0, 1, 0, 1), p=0.3, seed=5, device=device)
    check_same_bits(case)


LENGTHS = [1, 2, 3, 31, 113, 239, 799, 1023]
FEATURES = [1, 3, 31, 34, 40, 64, 80, 128, 160, 258, 512]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("K", FEATURES)
def test_odd_shapes(K, dtype):
    for place, M in enumerate(LENGTHS):
        N = LENGTHS[(place + FEATURES.index(K)) % len(LENGTHS)]
        mask = (None, masks.LowerTriangularFromBottomRightMask())[place % 2]
        B = max(1, 16384 // (M * N))  # few numbers in half precision err by luck
        case = make_case(B, M, N, 4, 2, K, mask=mask, bias=(1, 1, 0, 1), dtype=dtype, device="cuda")
        check_triton(case)


@pytest.fixture
def matmul_precision():
    before = torch.get_float32_matmul_precision()
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(("setting", "expected"), [("highest", ("bf16x6", 3)), ("high", ("bf16x3", 2))])
def test_float32_precision_setting(setting, expected, monkeypatch, matmul_precision):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)  # it knows float32 only
    matmul_precision(setting)
    assert (bf16_split.precision(), bf16_split.piece_count(torch.float32)) == expected
    assert bf16_split.piece_count(torch.bfloat16) == bf16_split.piece_count(torch.float16) == 1


def rounded(tensor, digits):
    """As many binary digits of the significand of each number."""
    significand, exponent = torch.frexp(tensor.detach())
    return torch.ldexp((significand * 2**digits).round() / 2**digits, exponent)


@pytest.mark.parametrize(
    "name", ["plain", "causal", "soft cap", "dropout", "features in several blocks", "bias"]
)
@torch.no_grad()
def test_tf32_allowed(device, name, matmul_precision):
    """Forward is not float32, and much closer to it than if its operands were rounded to TF32."""
    skip_unless_runnable("triton", device)
    case = make_case(**({"B": 1, "H": 2, "bias": (1, 1, 1, 1)} | CASES.get(name, {})), device=device)
    operands = (rounded(each, 11) for each in (case.query, case.key, case.value))
    tf32 = dense(type(case)(*operands, case.bias, case.mask, case.options))
    exact = dense(case.to(torch.float64))
    three = ours(case, backend="triton")
    matmul_precision("high")
    two = ours(case, backend="triton")
    for place in range(2):
        of_tf32, of_two, of_three = (norm(each[place] - exact[place]) for each in (tf32, two, three))
        assert 2 * of_three < of_two < of_tf32 / 16


def always(*given):
    return True


# M, N, K and the bias: from stored weights, and from scores that each kernel computes again.
WAYS = {"stored": (20, 140, 150, (0, 1, 1, 1)), "recomputed": (300, 140, 100, None)}


@pytest.mark.parametrize("way", WAYS)
def test_gradients_with_tf32_allowed(device, matmul_precision, way, monkeypatch):
    """Gradients err more than in float32, and much less than TF32's."""
    skip_unless_runnable("triton", device)
    M, N, K, bias = WAYS[way]
    if way == "recomputed":
        monkeypatch.setattr("lowtide.ops.attention.triton_backend.launch_backward._leaves_idle", always)
    case = make_case(1, M, N, 2, K=K, bias=bias, device=device)
    upstream = make_upstream(case)
    exact = differentiate(dense, case.to(torch.float64), upstream)
    found = []
    for setting in ("highest", "high"):
        matmul_precision(setting)
        gradients = differentiate(ours, case, upstream, backend="triton")
        found.append([norm(gradients[name] - each) / norm(each) for name, each in exact.items()])
    for three, two in zip(*found):
        assert 2 * three < two < 2**-11 / 16


@pytest.mark.parametrize(
    ("dtype", "device_name", "message"),
    [
        (torch.float64, "cpu", "query is float64"),
        (torch.float32, "meta", "query must have data, got a tensor on meta"),
    ],
)
def test_kernels_refuse(dtype, device_name, message):
    pytest.importorskip("triton")
    if device_name == "cpu":
        skip_unless_runnable("triton", "cpu")
    x = torch.zeros(1, 4, 1, 8, dtype=dtype, device=device_name)
    with pytest.raises(ValueError, match=message):
        lowtide.memory_efficient_attention(x, x, x, backend="triton")
