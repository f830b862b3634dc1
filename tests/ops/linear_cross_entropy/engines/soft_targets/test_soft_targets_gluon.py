"""The Gluon GEMM for class probabilities gives the same numbers as the Triton one.

So it does whichever tiles are cut off. test_soft_targets.py tests the Triton GEMM in the
interpreter.

Shapes: C tokens, D features (R of a second term), V classes; T parts of a row.
"""

import pytest
import torch

from tests.conftest import NEEDS_CUDA

pytest.importorskip("triton")

from lowtide.core.kernels import backend
from lowtide.ops.linear_cross_entropy.engines.formulas.row_math import LogitTransform, TileColumns
from lowtide.ops.linear_cross_entropy.engines.soft_targets import engine, gemm_triton

OPTIONS = {
    "plain": (0, {}),
    "two terms": (24, {}),
    "bias": (0, {"bias": True}),
    "scale": (0, {"scale": True}),
    "smoothed": (0, {"smoothing": (0.9, 0.1 / 208)}),
    "class weights": (0, {"class_weight": True}),
    "all": (
        64,
        {"bias": True, "scale": True, "smoothing": (0.9, 0.1 / 208), "class_weight": True},
    ),
}


def made(C, D, V, R, *, bias=False, scale=False, smoothing=(1, 0), class_weight=False):
    """Make RowCoefs, columns, and memory for distances; its rows and those of y exceed V."""
    terms = []
    for features in (D, R) if R else (D,):
        x = torch.randn(C, features, device="cuda", dtype=torch.bfloat16)
        terms.append((x, torch.randn(V, features, device="cuda").div(features**0.5).bfloat16()))
    y_CV = torch.randn(C, V + 24, device="cuda").softmax(1).bfloat16()[:, :V]
    columns = TileColumns(
        first_class=0,
        transform=LogitTransform(
            torch.randn(V, device="cuda") if bias else None,
            torch.tensor(0.7, device="cuda") if scale else None,
        ),
        class_weight_B=torch.rand(V, device="cuda") if class_weight else None,
        soft_CB=y_CV,
        smoothing=smoothing,
    )
    place_CV = torch.full((C, V + 8), 7.0, device="cuda", dtype=torch.bfloat16)
    return terms, columns, place_CV


def whole(place_CV):
    """Return distances as whole numbers."""
    return place_CV.view(torch.int16).int() & 0xFFFF


@pytest.mark.gpu
@NEEDS_CUDA
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    ("C", "D", "V"), [(1, 8, 16), (37, 24, 208), (128, 64, 256), (300, 200, 1040), (700, 136, 50304)]
)
def test_gluon_matches_triton(options, C, D, V):
    if not backend.pipelines_on(torch.device("cuda")):
        pytest.skip("needs a Hopper card, and a release of Triton that is known")
    R, changes = OPTIONS[options]
    terms, columns, place_CV = made(C, D, V, R, **changes)
    expected_CV, again_CV = place_CV.clone(), place_CV.clone()
    assert engine.fits_pipeline(columns.soft_CB, place_CV[:, :V])
    found = engine.distances(terms, columns, place_CV[:, :V])
    expected = gemm_triton.distances(terms, columns, expected_CV[:, :V])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert (whole(place_CV) - whole(expected_CV)).abs().max() <= 1
    assert (place_CV[:, V:] == 7).all()
    for _ in range(3):
        assert torch.equal(engine.distances(terms, columns, again_CV[:, :V]), found)
        assert torch.equal(whole(again_CV), whole(place_CV))
        assert torch.equal(engine.distances(terms, columns, None), found)


def test_gluon_supported(monkeypatch):
    """Rows do not overlap and begin at multiples of 16 bytes; memory is of 16 bits or None."""
    monkeypatch.setattr(backend, "pipelines_on", lambda device: True)
    y_CV = torch.zeros(16, 64, dtype=torch.bfloat16)
    fits = engine.fits_pipeline
    assert fits(y_CV, None)
    assert fits(y_CV[3:, :40], y_CV.half())
    for other in (y_CV.t()[:16], y_CV[:1].expand(16, 64), y_CV[:, 4:], y_CV.view(-1)[: 16 * 63].view(16, 63)):
        assert not fits(other, None)
    assert not fits(y_CV.half(), None)
    assert not fits(y_CV, y_CV.float())
