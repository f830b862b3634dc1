"""Kernels end after the rows that count, whose number only the device knows.

On the CPU through Triton's interpreter; test_ignored_rows.py has whole calls.

Shapes: N tokens, D features, V classes; C tokens of a chunk.
"""

import pytest
import torch

pytest.importorskip("triton")

from lowtide.ops.linear_cross_entropy.engines.exponentials import input_gradient
from lowtide.ops.linear_cross_entropy.engines.exponentials.gemm import launch
from lowtide.ops.linear_cross_entropy.engines.gemm.counted_rows import CountedChunk
from lowtide.ops.linear_cross_entropy.engines.weight_gradient import packed_triton, row_kernels
from lowtide.ops.linear_cross_entropy.planning.division import cost_model
from tests.ops.linear_cross_entropy.on_exponentials import (
    dtype_on,
    everywhere,  # noqa: F401
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

V = 101


def chunk_of(device: str, counted: int, C: int, first_place: int = 0) -> CountedChunk:
    row_C = torch.arange(C, device=device).flip(0)
    number = torch.tensor([first_place + counted], dtype=torch.int32, device=device)
    return CountedChunk(row_C, number, first_place)


@pytest.mark.parametrize("first_place", [0, 64])
@pytest.mark.parametrize("counted", [0, 1, 16, 37])
def test_exponentials_end_early(device, counted, first_place):
    tile = launch.tiles.BLOCK_C
    C, dtype = 5 * tile, dtype_on(device)
    counted = counted * tile // 16
    x_CD, weight_BD = torch.randn(C, 24, device=device).to(dtype), torch.randn(V, 24, device=device).to(dtype)
    outs = [torch.full((C, 104), 7.0, dtype=dtype, device=device) for _ in range(2)]
    target_C = torch.zeros(C, dtype=torch.long, device=device)
    reference_C = torch.zeros(C, device=device)
    for out_CB, chunk in zip(outs, (CountedChunk(), chunk_of(device, counted, C, first_place))):
        exponentials = launch.Exponentials(
            (x_CD, weight_BD), reference_C=reference_C, target_C=target_C, out_CB=out_CB[:, :V],
            transform=launch.NO_TRANSFORM, counted=chunk,
        )  # fmt: skip
        exponentials.run(sums=exponentials.partials())
    done = -(-counted // tile) * tile
    assert torch.equal(outs[1][:done], outs[0][:done])
    assert (outs[1][done:] == 7).all()


@pytest.mark.parametrize("counted", [0, 1, 40])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_packed_product_ends_early(device, counted, add, last):
    """The product takes the rows up to the count. If there are none, and the sum is not to be
    rounded, nothing is touched. A first product that is also the last is that of a single GEMM,
    which leaves the rows of targets with 24 bits."""
    C, D = 64, 32
    exp_CV = torch.rand(C, 104, device=device).bfloat16()
    x_CD = torch.randn(C, D, device=device).bfloat16()
    x_CD[counted:] = 0
    block = packed_triton.BLOCK_C
    exp_CV[-(-counted // block) * block :] = torch.nan  # a block of rows is read whole
    if device == "cpu":
        exp_CV, x_CD = exp_CV.float(), x_CD.float()
    pair_VP = torch.randint(1 << 20, (104, D // 2), dtype=torch.int32, device=device)
    low_VP = torch.zeros(104, D // 2, dtype=torch.int16, device=device).view(torch.uint16)
    more = {}
    if last and add:
        more["rounding"] = torch.tensor(0.5, device=device), None, None
    first_V, target_V = torch.full((104,), C, dtype=torch.int32, device=device), torch.arange(104) % 3 == 1
    first_V[target_V] = torch.randperm(C)[: target_V.sum()].to(first_V)
    low_CP = torch.zeros(C, D // 2, dtype=torch.int16, device=device).view(torch.uint16)
    if last and not add:
        more["targets"] = first_V, low_CP
    found, expected = (pair_VP.clone(), low_VP.clone()), (pair_VP.clone(), low_VP.clone())
    chunk = chunk_of(device, counted, C)
    packed_triton.add_product(*found, exp_CV, x_CD, add=add, counted=chunk, **more)
    packed_triton.add_product(*expected, exp_CV.nan_to_num(1.0), x_CD, add=add, **more)
    if counted == 0 and add and not last:
        assert torch.equal(found[0], pair_VP)
    else:
        assert torch.equal(found[0], expected[0])
    if last and not add:
        gradient_VD = exp_CV.nan_to_num(1.0).double().t() @ x_CD.double()
        rounded_VD = found[0].view(torch.bfloat16).double()
        torch.testing.assert_close(rounded_VD[~target_V], gradient_VD[~target_V], rtol=2**-7, atol=1e-6)
        assert torch.equal(found[1], low_VP)
        upper_VP, low_TP = found[0][target_V], low_CP[first_V[target_V].long()].int()
        even_TP, odd_TP = (upper_VP << 16) | ((low_TP & 0xFF) << 8), (upper_VP & -65536) | (low_TP & 0xFF00)
        kept_TD = torch.stack([even_TP, odd_TP], 2).view(torch.float32).flatten(1)
        torch.testing.assert_close(kept_TD.double(), gradient_VD[target_V], rtol=2**-15, atol=1e-5)


@pytest.mark.parametrize("programs", [2, 4, 7, 9, 14])
@pytest.mark.parametrize("D", [24, 48, 72])
@pytest.mark.parametrize("counted", [0, 1, 37, 80])
def test_input_gradient_ends_early(device, monkeypatch, counted, D, programs):
    """Rows lie where the order says; others are left as they are. Some tiles are divided, with and
    without tails, whatever memory lay there before."""
    monkeypatch.setattr(input_gradient, "multiprocessors", lambda device: programs)
    monkeypatch.setattr(cost_model, "FEWEST_CLASSES_OF_PART", 16)
    monkeypatch.setattr(input_gradient, "BLOCK_V", 16)
    tile = 128 if device == "cuda" else 16
    C, counted, dtype = 5 * tile, counted * tile // 16, dtype_on(device)
    V = 300  # 19 steps
    exp_CV = torch.rand(C, 304, device=device).to(dtype)[:, :V]
    weight_VD = torch.randn(V, D, device=device).to(dtype)
    target_C = torch.randint(V, (C,), device=device)
    ignored_C = torch.arange(C, device=device) >= max(counted - 1, 0)
    scale_C, coef_C, factor = torch.rand(C, device=device), torch.randn(C, device=device), torch.tensor(0.5)
    out_CD = torch.full((C, D), 7.0, device=device, dtype=dtype)
    chunk = chunk_of(device, counted, C)
    rest = (None, None, factor.to(device), out_CD, chunk)
    input_gradient.input_gradient(exp_CV, weight_VD, target_C, ignored_C, scale_C, coef_C, *rest)
    product_CD = exp_CV.double() @ weight_VD.double()
    expected_CD = scale_C[:, None] * product_CD
    expected_CD += coef_C[chunk.row_C, None] * weight_VD[target_C].double()
    expected_CD = (0.5 * expected_CD).masked_fill(ignored_C[:, None], 0)
    found_CD = out_CD[chunk.row_C]  # rows of the matrix, in the order of places
    tolerance = 2**-8 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(
        found_CD[:counted].double(), expected_CD[:counted], rtol=tolerance, atol=tolerance
    )
    assert (found_CD[counted:] == 7).all()


@pytest.mark.parametrize("counted", [0, 1, 37])
def test_rows_are_gathered_and_cleared(device, counted):
    x_ND = torch.randn(80, 24, device=device)
    chunk = chunk_of(device, counted, 80)
    x_CD = torch.empty_like(x_ND)
    row_kernels.gather_rows(x_CD, x_ND, chunk)
    assert torch.equal(x_CD[:counted], x_ND.flip(0)[:counted])
    assert not x_CD[counted:].any()
    exp_CB = torch.full((80, 40), torch.nan, device=device)
    row_kernels.clear_rows(exp_CB[:, :33], chunk)
    exp_CB = exp_CB[chunk.row_C]
    assert exp_CB[:counted].isnan().all()
    assert not exp_CB[counted:, :33].any()
    assert exp_CB[:, 33:].isnan().all()


# On a card.
