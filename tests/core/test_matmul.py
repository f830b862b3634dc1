"""Tests of lowtide.core.matmul: products whose sizes are no multiple of 16 bytes."""

import statistics
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowtide.core.matmul import product, whole_vectors
from tests.conftest import NEEDS_CUDA

SIZES = st.integers(1, 40)


def _matrix(rows: int, columns: int, dtype: torch.dtype, *, transposed: bool, padded: bool) -> torch.Tensor:
    if transposed:
        return _matrix(columns, rows, dtype, transposed=False, padded=padded).t()
    stride = -(-columns // 8) * 8 if padded else columns
    return torch.randint(-4, 5, (rows, stride)).to(dtype)[:, :columns]


@given(M=SIZES, N=SIZES, K=SIZES, layouts=st.lists(st.booleans(), min_size=6, max_size=6), half=st.booleans())
def test_whole_vectors_cover_a_product_once(M: int, N: int, K: int, layouts: list[bool], half: bool) -> None:
    a = _matrix(M, K, torch.bfloat16, transposed=layouts[0], padded=layouts[1])
    b = _matrix(K, N, torch.bfloat16, transposed=layouts[2], padded=layouts[3])
    out = _matrix(M, N, torch.bfloat16 if half else torch.float32, transposed=layouts[4], padded=layouts[5])
    parts = whole_vectors(out, a, b)
    if not parts:
        return
    sums = torch.zeros(M, N)
    for rows, columns, inner in parts:
        sums[rows, columns] += a[rows, inner].float() @ b[inner, columns].float()
    assert torch.equal(sums, a.float() @ b.float())
    first = [size.stop - size.start for size in parts[0]]
    cut = [now for now, before in zip(first, (M, N, K)) if now != before]
    assert len(cut) == 1
    assert cut[0] % 8 == 0
    assert not (half and first[2] != K)  # a sum of two parts would be rounded between them


@pytest.mark.parametrize("V", [104, 105])
def test_whole_vectors_of_a_padded_row(V: int) -> None:
    exp_CV = torch.zeros(16, 112, dtype=torch.bfloat16)[:, :V]
    weight_VD, x_CD = torch.zeros(V, 24, dtype=torch.bfloat16), torch.zeros(16, 24, dtype=torch.bfloat16)
    dx_CD, dw_VD = torch.zeros(16, 24), torch.zeros(V, 24)
    inner = [part[2].stop for part in whole_vectors(dx_CD, exp_CV, weight_VD)]
    rows = [part[0].stop for part in whole_vectors(dw_VD, exp_CV.t(), x_CD)]
    assert inner == rows == ([] if V == 104 else [104, 105])


def test_whole_vectors_of_unaligned_rows_are_none() -> None:
    x_CD, weight_VD = torch.zeros(16, 27, dtype=torch.bfloat16), torch.zeros(105, 27, dtype=torch.bfloat16)
    assert not whole_vectors(torch.zeros(16, 112)[:, :105], x_CD, weight_VD.t())


@pytest.mark.gpu
@NEEDS_CUDA
@pytest.mark.parametrize("V", [50257, 100278])
@pytest.mark.parametrize("add", [False, True])
def test_product_of_an_odd_vocabulary_is_as_quick_and_exact(V: int, add: bool) -> None:
    C, D, padded = 8192, 2048, -(-V // 8) * 8
    generator = torch.Generator("cuda").manual_seed(0)
    exp_CP = torch.randn(C, padded, dtype=torch.bfloat16, device="cuda", generator=generator)
    weight_PD = torch.randn(padded, D, dtype=torch.bfloat16, device="cuda", generator=generator)
    x_CD = torch.randn(C, D, dtype=torch.bfloat16, device="cuda", generator=generator)
    dx_CD, dw_PD = torch.ones(C, D, device="cuda"), torch.ones(padded, D, device="cuda")

    def both(V: int) -> None:
        product(dx_CD, exp_CP[:, :V], weight_PD[:V], add=add)
        product(dw_PD[:V], exp_CP[:, :V].t(), x_CD, add=add)

    # Tensor cores truncate as they add up, so a long product errs by 1e-4 with whole vectors, too.
    errors = []
    for size in (padded, V):
        dx_CD.fill_(1), dw_PD.fill_(1)
        both(size)
        exact_CD = exp_CP[:, :size].double() @ weight_PD[:size].double() + add
        exact_VD = exp_CP[:, :size].t().double() @ x_CD.double() + add
        pairs = ((dx_CD, exact_CD), (dw_PD[:size], exact_VD))
        errors.append([((found - exact).norm() / exact.norm()).item() for found, exact in pairs])
    assert max(errors[1]) <= 1.2 * max(errors[0]) + 1e-6 < 1e-3
    rounds = [(_milliseconds(both, V), _milliseconds(both, padded)) for _ in range(9)]
    assert statistics.median(odd / even for odd, even in rounds) < 1.3


def _milliseconds(function: Callable[[int], None], size: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    function(size)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)
