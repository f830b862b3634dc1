"""The kernels that pack and merge statistics of several ranks, held against the same in torch.

test_vocab_parallel_exponentials.py holds both against the dense truth.
"""

import pytest
import torch

from lowtide.ops.linear_cross_entropy.engines import excluded_part_stats
from lowtide.ops.linear_cross_entropy.engines.formulas.row_math import ExcludedTargetStats, RowCoefs

triton_formulas = pytest.importorskip(
    "lowtide.ops.linear_cross_entropy.engines.excluded_part_stats_triton",
    reason="needs Triton",
    exc_type=ImportError,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in Triton's interpreter

C, FIRST = 300, 1000  # more rows than a program's


def rows(device, elsewhere=True):
    place_C = torch.arange(C, device=device) % 7 - (1 if elsewhere else 0)
    ignored_C = torch.arange(C, device=device) % 11 == 0
    zero_C = torch.zeros(C, device=device)
    return RowCoefs(place_C.clamp(min=-1), ignored_C, zero_C, zero_C)


def stats(device, *, smooth):
    """Rows like those of a trained head, and some with all or none of their exponentials 0."""
    max_C, sum_C = 8 * torch.randn(C), torch.rand(C) * 1000
    sum_C[3::17] = 0
    max_C[5::19], sum_C[5::19] = -torch.inf, 0
    vectors = {"max_N": max_C, "sum_N": sum_C, "nll_N": torch.zeros(C)}
    vectors["target_logit_N"] = torch.zeros(C)
    if smooth:
        vectors["smooth_nll_N"] = torch.zeros(C)
    return ExcludedTargetStats(**{name: each.to(device) for name, each in vectors.items()})


def close(found, expected, largest=1.0):
    """Within a few roundings of float32, of numbers up to `largest`."""
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6 * largest, equal_nan=True)


@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_merge(device, ranks, smooth):
    """Every number: of rows with targets on each rank, ignored rows, NaN and infinite logits."""
    torch.manual_seed(ranks)
    smooth_logit_C = torch.randn(C, device=device) if smooth else None
    packed = []
    for rank in range(ranks):
        row, part = rows(device, elsewhere=rank > 0), stats(device, smooth=smooth)
        part.max_N[-1], part.max_N[-2] = (torch.nan, torch.inf) if rank == 1 else (0.0, 1.0)
        logit_C = part.max_N + torch.randn(C, device=device).abs()
        logit_C[row.target_N < 0] = -torch.inf
        pair = [
            formulas.pack(part, logit_C, row, FIRST, smooth_logit_C)
            for formulas in (excluded_part_stats, triton_formulas)
        ]
        assert torch.equal(pair[0][:3].nan_to_num(), pair[1][:3].nan_to_num())
        close(pair[1].nan_to_num(), pair[0].nan_to_num())
        packed.append(pair[0])
    parts_PKC, row = torch.stack(packed), rows(device)
    found = []
    for formulas in (excluded_part_stats, triton_formulas):
        out = stats(device, smooth=smooth)
        factor_C = formulas.merge(out, parts_PKC, packed[0], row, 5000)
        found.append({"factor": factor_C, "smooth": out.smooth_nll_N, "nll": out.nll_N, "sum": out.sum_N})
        found[-1] |= {"max": out.max_N, "target_logit": out.target_logit_N}
    for name, one in found[0].items():
        if one is not None:  # a log-sum-exp times 5000, less what ranks sent
            close(one, found[1][name], largest=5000.0 if name == "smooth" else 1.0)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_first_references(device, elsewhere):
    row, sampled_C = rows(device, elsewhere), torch.randn(C, device=device)
    logits = [torch.linspace(-9, 9, C, device=device).clone() for _ in range(2)]
    first, second = (
        formulas.first_references(logit_C, sampled_C, row)
        for formulas, logit_C in zip((excluded_part_stats, triton_formulas), logits)
    )
    assert torch.equal(first, second)
    assert torch.equal(*logits)
    assert (logits[0][row.target_N < 0] == -torch.inf).all()
