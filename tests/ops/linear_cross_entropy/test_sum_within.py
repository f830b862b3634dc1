"""What surrounds a sum within a float32 gradient, with torch's products for the pipeline's: the order in
which they, targets' rows and label smoothing come to it. test_sum_pipeline.py has the products themselves."""

import pytest
import torch

pytest.importorskip("triton")

from lowtide.ops.linear_cross_entropy.engines.exponentials import linear_term
from lowtide.ops.linear_cross_entropy.engines.weight_gradient import accumulators
from tests.ops.linear_cross_entropy.on_exponentials import everywhere  # noqa: F401
from tests.support.loss import differentiate, fused, make_inputs, planned, workspace_for

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's NumPy


def parts(pair_VD, low):
    V, D = pair_VD.shape
    pairs = pair_VD.view(V, D // 256, 256)[..., :128]
    return pairs, low.view(torch.int16).view(V, D // 256, 512)[..., 256:384]


def unpacked(pair_VD, low):
    pairs, lows = parts(pair_VD, low)
    even, odd = (pairs << 16) | ((lows.int() & 0xFF) << 8), (pairs & -65536) | (lows.int() & 0xFF00)
    return torch.stack([even, odd], -1).view(torch.float32).reshape(pair_VD.shape)


def pack(pair_VD, low, value_VD):
    pairs, lows = parts(pair_VD, low)
    bits = value_VD.view(torch.int32).view(*pairs.shape, 2) + 0x80
    pairs.copy_(((bits[..., 0] >> 16) & 0xFFFF) | (bits[..., 1] & -65536))
    lows.copy_((((bits[..., 0] >> 8) & 0xFF) | (bits[..., 1] & 0xFF00)).to(torch.int16))


@pytest.fixture
def products(monkeypatch):
    seen = []

    def add_in_torch(pair_VD, low, exp_CV, x_CD, *, add, rounding=(None, None, None), out_VD=None):
        seen.append((add, out_VD is not None))
        value_VD = exp_CV.t() @ x_CD
        if add:
            value_VD = value_VD + unpacked(pair_VD, low)
        if out_VD is None:
            pack(pair_VD, low, value_VD)
            return
        factor, class_weight_V, spread_D = rounding
        assert factor is None
        if spread_D is not None:
            value_VD = value_VD - (spread_D if class_weight_V is None else class_weight_V[:, None] * spread_D)
        out_VD.copy_(value_VD)

    monkeypatch.setattr(accumulators, "add_in_pipeline", add_in_torch)
    return seen


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("class_weight", [False, True])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.2}, {"softcap": 3.0, "z_loss": 0.1}], ids=str)
@pytest.mark.parametrize("chunks", [1, 3])
def test_as_the_float32_sum(device, chunks, options, class_weight, reduction, products, monkeypatch):
    if device == "cuda":
        pytest.skip("test_sum_pipeline.py has the card's own")
    N = 48
    inputs = make_inputs(N, 256, 101, device=device, class_weight=class_weight, bias=True)
    rows = N // chunks
    options = dict(options, reduction=reduction, backend="triton")
    bytes = workspace_for(inputs, lambda plan: plan.rows >= rows, **options)
    assert -(-N // planned(inputs, bytes, **options).rows) == chunks
    upstream = torch.randn(N) if reduction == "none" else torch.tensor(-0.37)
    expected = differentiate(fused, inputs, upstream, workspace=bytes, **options)
    assert not products
    monkeypatch.setattr(linear_term, "fits_within", lambda gradient_VD, rows: True)
    found = differentiate(fused, inputs, upstream, workspace=bytes, **options)
    if chunks == 1:
        assert not products
    else:
        assert products == [(False, False), *[(True, False)] * (chunks - 2), (True, True)]
    for name, want in expected.items():
        error = (found[name] - want).norm() / want.norm()
        rounded = name == "linear_weight" and chunks > 1
        assert (error > 0) == rounded, name
        assert error < 1e-5  # at most half of 2^-16 an addition, of five
