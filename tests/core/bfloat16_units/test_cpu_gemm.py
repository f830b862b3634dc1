"""Products of bfloat16 operands with float32 sums on a CPU, against float64 of the same operands.

What is allowed: a float32 sum of K products is off by about sqrt(K) halves of its last digit at
most, of what its addends are in size. A logit's error is the exponential's relative error; the
exponential itself, the difference before it and the sum add a few units of 2^-24. To bfloat16 one
rounds by 2^-8 at most."""

import pytest
import torch

from lowtide.core.bfloat16_units import gemm

needs_products = pytest.mark.skipif(not gemm.available(), reason="no units for bfloat16, or no compiler")

EPS = 2.0**-24
SHAPES = [
    (1, 1, 1),
    (1, 7, 5),
    (3, 1, 129),
    (2, 7, 1),
    (33, 64, 127),
    (65, 513, 130),
    (31, 1500, 333),
    (530, 515, 301),  # more rows than wait at a time
    (700, 40, 64),
    (17, 2, 9000),  # more blocks of classes than runs
]


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def matrix(rows: int, columns: int, seed: int, *, apart: int = 0, factor: float = 1.0) -> torch.Tensor:
    """Rows that lie ``apart`` numbers apart, with NaN between, which nobody may read."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.full((rows, columns + apart), float("nan"), dtype=torch.bfloat16)
    whole[:, :columns] = torch.randn(rows, columns, generator=generator) * factor
    return whole[:, :columns]


def operands(C: int, D: int, V: int, *, apart: int = 0, logits: float = 1.0):
    x_CD = matrix(C, D, 0, apart=apart)
    weight_VD = matrix(V, D, 1, apart=apart, factor=logits / D**0.5)
    generator = torch.Generator().manual_seed(2)
    target_C = torch.randint(-1, V, (C,), generator=generator)
    bias_V = torch.randn(V, generator=generator)
    return x_CD, weight_VD, target_C, bias_V


def truth(x_CD, weight_VD, reference_C, target_C, scale, bias_V):
    """Exponentials, their sums, the other classes' largest logit; a float32 logit's error."""
    x_CD, weight_VD = x_CD.double(), weight_VD.double()
    z_CV = scale * x_CD @ weight_VD.T
    size_CV = abs(scale) * x_CD.abs() @ weight_VD.abs().T + reference_C.double().abs()[:, None]
    if bias_V is not None:
        z_CV = z_CV + bias_V.double()
        size_CV = size_CV + bias_V.double().abs()
    e_CV = torch.exp(z_CV - reference_C.double()[:, None])
    targets = torch.arange(z_CV.shape[1]) == target_C[:, None]
    e_CV = e_CV.masked_fill(targets, 0)
    off_CV = EPS * (x_CD.shape[1] ** 0.5 + 4) * size_CV
    return e_CV, e_CV.sum(1), z_CV.masked_fill(targets, -torch.inf).amax(1), off_CV


def assert_exponentials(x_CD, weight_VD, target_C, *, scale=1.0, bias_V=None, apart=0, shift=1.0):
    C, V = x_CD.shape[0], weight_VD.shape[0]
    z_CV = scale * x_CD.float() @ weight_VD.float().T + (0 if bias_V is None else bias_V)
    reference_C = z_CV.amax(1) - shift
    out_CV = torch.full((C, V + apart), 7.0, dtype=torch.bfloat16)
    sum_C, max_C = gemm.exponentials(
        x_CD, weight_VD, reference_C, target_C, scale=scale, bias_V=bias_V, out_CV=out_CV[:, :V]
    )
    e_CV, expected_C, largest_C, off_CV = truth(x_CD, weight_VD, reference_C, target_C, scale, bias_V)
    normal = e_CV >= torch.finfo(torch.float32).tiny  # smaller ones are zeros to these units
    error_CV = (out_CV[:, :V].double() - e_CV).abs()
    assert (error_CV <= (2.0**-8 + 1.01 * off_CV) * e_CV)[normal].all()
    assert (error_CV[~normal] <= torch.finfo(torch.float32).tiny).all()
    assert (out_CV[:, V:] == 7).all()
    relative_C = off_CV.amax(1) + 32 * EPS
    assert ((sum_C.double() - expected_C).abs() <= relative_C * expected_C).all()
    assert ((max_C.double() - largest_C).abs() <= off_CV.amax(1))[largest_C > -torch.inf].all()
    assert (max_C[largest_C == -torch.inf] == -torch.inf).all()
    alone_C, alone_max_C = gemm.exponentials(
        x_CD, weight_VD, reference_C, target_C, scale=scale, bias_V=bias_V
    )
    assert torch.equal(alone_C, sum_C)
    assert torch.equal(alone_max_C, max_C)
    return out_CV[:, :V]


@needs_products
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("apart", [0, 3])
def test_exponentials(shape, apart):
    x_CD, weight_VD, target_C, bias_V = operands(*shape, apart=apart)
    assert_exponentials(x_CD, weight_VD, target_C, apart=apart)
    assert_exponentials(x_CD, weight_VD, target_C, scale=-1.7, bias_V=bias_V, apart=apart)


@needs_products
@pytest.mark.parametrize("shift", [0.0, 1.0, 80.0, -80.0])
def test_big_logits(shift):
    x_CD, weight_VD, target_C, bias_V = operands(33, 64, 300, logits=40.0)
    assert_exponentials(x_CD, weight_VD, target_C, bias_V=bias_V, shift=shift)


@needs_products
@pytest.mark.parametrize("cap", [1e-3, 1.0, 30.0, 1e4])
def test_soft_cap(cap):
    """Exponentials times the cap's derivative: where the cap is far, near, and reached."""
    x_CD, weight_VD, target_C, bias_V = operands(33, 64, 300, logits=40.0)
    z_CV = x_CD.double() @ weight_VD.double().T + bias_V.double()
    capped_CV, slope_CV = cap * torch.tanh(z_CV / cap), 1 / torch.cosh(z_CV / cap) ** 2
    reference_C, out_CV = capped_CV.amax(1).float(), torch.empty(33, 300, dtype=torch.bfloat16)
    sum_C, max_C = gemm.exponentials(
        x_CD, weight_VD, reference_C, target_C, bias_V=bias_V, softcap=cap, out_CV=out_CV
    )
    others = torch.arange(300) != target_C[:, None]
    e_CV = torch.exp(capped_CV - reference_C.double()[:, None]) * others
    size_CV = x_CD.double().abs() @ weight_VD.double().abs().T + bias_V.double().abs()
    off_CV = EPS * (12 * size_CV + 8 * capped_CV.abs())
    expected_CV = e_CV * slope_CV
    least = 16 * torch.finfo(torch.float32).tiny  # what a cap that is reached leaves
    normal = expected_CV >= least
    limit_CV = (2.0**-8 + 1.01 * off_CV * (1 + 2 / cap)) * expected_CV
    assert ((out_CV.double() - expected_CV).abs() <= limit_CV)[normal].all()
    assert (out_CV.double()[~normal].abs() <= 2 * least).all()
    assert ((sum_C - e_CV.sum(1)).abs() <= (off_CV.amax(1) + 32 * EPS) * e_CV.sum(1)).all()
    largest_C = capped_CV.masked_fill(~others, -torch.inf).amax(1)
    assert ((max_C - largest_C).abs() <= off_CV.amax(1)).all()


@needs_products
def test_soft_cap_of_extremes():
    """Infinite logits become the cap, and NaN stays, in the sums without stored numbers as well."""
    bias_V = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0, 1e38])
    zero_CD, nobody_C = torch.zeros(1, 2, dtype=torch.bfloat16), torch.tensor([-1])
    zero_VD, out_CV = torch.zeros(5, 2, dtype=torch.bfloat16), torch.empty(1, 5, dtype=torch.bfloat16)
    for cap in (2.0**-100, 2.0, 2.0**100):
        given = (zero_CD, zero_VD, torch.tensor([cap]), nobody_C)
        gemm.exponentials(*given, bias_V=bias_V, softcap=cap, out_CV=out_CV)
        found = out_CV[0].float()
        assert found[2].isnan()
        assert (found[:2].abs() <= 1e-37).all()  # the derivative where the cap is reached
        torch.testing.assert_close(found[3], torch.tensor(-cap).exp(), rtol=2**-8, atol=0)
        for one in (0, 1, 3):
            sums = gemm.exponentials(
                zero_CD, zero_VD[:1], torch.tensor([0.0]), nobody_C, bias_V=bias_V[one : one + 1], softcap=cap
            )
            capped = cap * torch.tanh(bias_V[one] / cap)
            torch.testing.assert_close(sums[1][0], capped)
            torch.testing.assert_close(sums[0][0], capped.clamp(-110, 90).exp(), rtol=1e-5, atol=1e-37)


@needs_products
def test_exponential_digits():
    """With weights of zero a logit is its bias, and exact; so is a sum of one."""
    bias = torch.linspace(-87, 88.5, 4001)
    zero = torch.zeros(1, 1, dtype=torch.bfloat16)
    nobody, reference = torch.tensor([-1]), torch.zeros(1)
    sums = [gemm.exponentials(zero, zero, reference, nobody, bias_V=b)[0] for b in bias.split(1)]
    expected = bias.double().exp()
    assert ((torch.cat(sums).double() - expected).abs() <= 4 * EPS * expected).all()


@needs_products
def test_exponential_out_of_range():
    weight_VD = torch.zeros(6, 1, dtype=torch.bfloat16)
    bias_V = torch.tensor([-torch.inf, -1e30, -104.0, 0.0, 89.0, 1e30])
    x_CD, target_C = torch.ones(1, 1, dtype=torch.bfloat16), torch.tensor([-1])
    out_CV = torch.empty(1, 6, dtype=torch.bfloat16)
    sum_C, max_C = gemm.exponentials(x_CD, weight_VD, torch.zeros(1), target_C, bias_V=bias_V, out_CV=out_CV)
    assert out_CV.tolist() == [[0, 0, 0, 1, torch.inf, torch.inf]]
    assert sum_C.item() == torch.inf
    assert max_C.item() == bias_V[-1].item()


@needs_products
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("features", [40, 600])
def test_nonfinite_in_its_row_only(bad, features):
    x_CD, weight_VD, target_C, _ = operands(35, features, 200)
    expected_C, _ = gemm.exponentials(x_CD, weight_VD, torch.zeros(35), target_C)
    x_CD[33, 1] = bad
    sum_C, _ = gemm.exponentials(x_CD, weight_VD, torch.zeros(35), target_C)
    assert not sum_C[33].isfinite()
    others = torch.arange(35) != 33
    assert torch.equal(sum_C[others], expected_C[others])
    e_CV = matrix(35, 200, 3)
    out_VD = torch.zeros(200, features)
    gemm.multiply_transposed(out_VD, e_CV, x_CD, add=True)
    assert not out_VD[:, 1].isfinite().any()
    assert out_VD[:, 2:].isfinite().all()


@needs_products
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("apart", [0, 3])
@pytest.mark.parametrize("add", [False, True])
def test_products(shape, apart, add):
    C, D, V = shape
    x_CD, weight_VD, _, _ = operands(*shape, apart=apart)
    e_CV = matrix(C, V, 4, apart=apart)
    cases = [
        (gemm.multiply, e_CV, weight_VD, e_CV, V),
        (gemm.multiply_transposed, e_CV, x_CD, e_CV.T, C),
    ]
    for function, first, second, left, length in cases:
        whole = torch.full((left.shape[0], D + apart), 7.0)
        out = whole[:, :D]
        before = (
            torch.randn(out.shape, generator=torch.Generator().manual_seed(5)) if add else torch.zeros(())
        )
        out.copy_(before if add else torch.full_like(out, float("nan")))
        function(out, first, second, add=add)
        expected = left.double() @ second.double() + before.double()
        size = left.double().abs() @ second.double().abs() + before.double().abs()
        assert ((out.double() - expected).abs() <= EPS * (length**0.5 + 2) * size).all()
        assert (whole[:, D:] == 7).all()


@needs_products
@pytest.mark.parametrize("shape", [(461, 300, 1500), (530, 515, 301), (5, 1, 20000), (40, 1030, 77)])
def test_same_bits_any_threads(shape):
    C, D, V = shape
    x_CD, weight_VD, target_C, bias_V = operands(*shape)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        e_CV = torch.empty(C, V, dtype=torch.bfloat16)
        sums = gemm.exponentials(x_CD, weight_VD, torch.zeros(C), target_C, bias_V=bias_V, out_CV=e_CV)
        out_CD, out_VD = torch.ones(C, D), torch.ones(V, D)
        gemm.multiply(out_CD, e_CV, weight_VD, add=True)
        gemm.multiply_transposed(out_VD, e_CV, x_CD, add=True)
        results.append((*sums, e_CV, out_CD, out_VD))
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other))


@needs_products
def test_library_shared_by_threads():
    """torch's own OpenMP: a second would have threads of its own."""
    x = matrix(64, 64, 0)
    gemm.multiply(torch.zeros(64, 64), x, x, add=False)
    with open("/proc/self/maps") as maps:
        found = {line.split()[-1] for line in maps if "gomp" in line or "iomp" in line}
    assert len(found) == 1


@needs_products
def test_unused_without_onednn():
    x = matrix(4, 4, 0)
    torch._C._set_mkldnn_enabled(False)
    try:
        assert not gemm.available()
        with pytest.raises(RuntimeError, match="multiply of bfloat16 operands failed"):
            gemm.multiply(torch.zeros(4, 4), x, x, add=False)
    finally:
        torch._C._set_mkldnn_enabled(True)
    assert gemm.available()
