"""The product that adds to a sum, in Gluon, on a Hopper card: the same numbers as the kernel in
Triton where there is one, bit by bit."""

import pytest
import torch

pytest.importorskip("triton")
from lowtide import linear_cross_entropy
from lowtide.core.kernels import backend
from lowtide.ops.linear_cross_entropy.engines.weight_gradient import accumulators, packed_triton
from tests.support.cuda_graphs import captured

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not backend.pipelines_on(torch.device("cuda")), reason="needs Hopper"
    ),
]


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    monkeypatch.setattr(backend, "FEWEST", 1)


LOWS = {24: torch.uint16, 20: torch.uint8}
# Tokens, features, classes; less than a stage, a tile or all tiles of a multiprocessor, and not.
SIZES = [
    (8, 32, 8),
    (64, 256, 128),
    (200, 288, 1000),
    (1000, 544, 2056),
    (328, 2304, 32008),
]


def operands(C, D, V, chunks):
    """As views of wider buffers, the rows after which are not to be read."""
    exp_CV = torch.full((chunks, C, V + 8), torch.nan, device="cuda", dtype=torch.bfloat16)[..., :V]
    x_CD = torch.full((chunks, C, D + 24), torch.nan, device="cuda", dtype=torch.bfloat16)[..., :D]
    exp_CV.copy_(torch.rand(chunks, C, V, device="cuda"))
    x_CD.copy_(torch.randn(chunks, C, D, device="cuda"))
    return exp_CV, x_CD


def guarded(rows, columns, dtype):
    """A tensor between others, and all of them."""
    whole = torch.full((rows + 256, columns), 77, device="cuda").to(dtype)
    return whole[128 : 128 + rows], whole


def untouched(whole):
    return bool((whole[:128].int() == 77).all() and (whole[-128:].int() == 77).all())


@pytest.mark.parametrize(("C", "D", "V"), SIZES)
@pytest.mark.parametrize("bits", [24, 20])
@pytest.mark.parametrize("last", [None, "factor", "spread", "class weights"])
def test_packed_sum_matches_triton(bits, last, C, D, V):
    chunks = 3
    exp_CV, x_CD = operands(C, D, V, chunks)
    factor, smoothing_row_D = torch.tensor(0.37, device="cuda"), torch.randn(D, device="cuda")
    weight_V = torch.rand(V, device="cuda")
    rounding = {
        None: (None, None, None),
        "factor": (factor, None, None),
        "spread": (factor, None, smoothing_row_D),
        "class weights": (factor, weight_V, smoothing_row_D),
    }[last]
    found = []
    pipeline = accumulators.add_in_pipeline
    for add in (packed_triton.add_product, pipeline, pipeline):
        (pair_VP, pairs), (low_VP, lows) = guarded(V, D // 2, torch.int32), guarded(V, D // 2, LOWS[bits])
        for chunk in range(chunks):
            each = (pair_VP, low_VP, exp_CV[chunk], x_CD[chunk])
            assert accumulators.pipelined(*each)
            options = {"rounding": rounding} if chunk == chunks - 1 else {}
            add(*each, add=chunk > 0, **options)
        assert untouched(pairs)
        assert untouched(lows)
        found.append((pair_VP, low_VP.int()))
    for pair_VP, low_VP in found[1:]:
        assert pair_VP.equal(found[0][0])
        assert low_VP.equal(found[0][1])


@pytest.mark.parametrize("bits", [24, 20])
@pytest.mark.parametrize("beside", [1, 1 << 40], ids=["some", "all"])
def test_classes_beside_a_sum_over_ranks_change_no_bit(monkeypatch, bits, beside):
    """The first classes are added on fewer multiprocessors, in a launch of their own."""
    C, D, V, chunks = 1000, 544, 8200, 3
    exp_CV, x_CD = operands(C, D, V, chunks)
    applied, weight_V, row_D = (
        torch.tensor(0.37, device="cuda"),
        torch.rand(V, device="cuda"),
        torch.randn(D, device="cuda"),
    )
    launched, add = [], accumulators.add_in_pipeline

    def noted(*given, spared=0, **options):
        launched.append((given[0].shape[0], spared))
        add(*given, spared=spared, **options)

    monkeypatch.setattr(accumulators, "add_in_pipeline", noted)
    found = []
    for moved in (0, beside):
        gradient_VD = torch.empty(V, D, device="cuda", dtype=torch.bfloat16)
        total = accumulators.PackedSum(gradient_VD, applied, bits=bits, beside=moved)
        for chunk in range(chunks):
            places = {"first": chunk == 0, "last": chunk == chunks - 1}
            total.add_product(exp_CV[chunk], x_CD[chunk], **places)
        total.subtract_outer(weight_V, row_D)
        total.finish()
        found.append(gradient_VD)
    assert torch.equal(*found)
    assert launched[:3] == [(V, 0)] * 3
    spared = [classes for classes, spared in launched[3:] if spared]
    assert len(spared) == 3
    assert set(spared) == {V} if beside > 1 else max(spared) < V
    assert sum(classes for classes, _ in launched[3:]) == 3 * V


def relative(found, exact):
    return ((found - exact).norm() / exact.norm()).item()


@pytest.fixture
def products(monkeypatch):
    """Of each product that goes through the pipeline, whether it adds."""
    seen, add = [], accumulators.add_in_pipeline

    def add_and_see(*each, **options):
        seen.append(options["add"])
        add(*each, **options)

    monkeypatch.setattr(accumulators, "add_in_pipeline", add_and_see)
    return seen


OPTIONS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "smoothing and class weights": {"label_smoothing": 0.1, "weight": True},
    "scale and z-loss": {"logit_scale": 0.7, "z_loss": 1e-3},
}


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", OPTIONS)
def test_float32_weight_autocast(products, name, reduction):
    """In several chunks and in one, with a float32 sum: the error of rounding exponentials."""
    N, D, V = 1500, 512, 3000
    x = torch.randn(N, D, device="cuda").bfloat16()
    weight = (torch.randn(V, D, device="cuda") * D**-0.5).requires_grad_()
    target = torch.randint(V, (N,), device="cuda")
    target[::9] = -100
    options = dict(OPTIONS[name], reduction=reduction)
    if options.get("weight"):
        options["weight"] = torch.rand(V, device="cuda")
    upstream = torch.randn(N, device="cuda") if reduction == "none" else torch.tensor(0.37, device="cuda")

    def gradient(x, weight, **others):
        loss = linear_cross_entropy(x, weight, target, **options, **others)
        return torch.autograd.grad(loss, weight, upstream.to(loss.dtype))[0]

    found = []
    for workspace in (4 << 20, 4 << 20, 64 << 20):
        with torch.autocast("cuda", torch.bfloat16):
            found.append(gradient(x, weight, workspace=workspace))
    assert not products
    assert torch.equal(found[0], found[1])
    exact = gradient(x.double(), weight.detach().bfloat16().double().requires_grad_(), backend="reference")
    several, _, one = (relative(each, exact) for each in found)
    assert one < 2e-3
    assert several < 1.1 * one


@pytest.mark.parametrize("float32", [False, True])
def test_cuda_graph(products, float32):
    """Of chunks in float32, or in 24 bits beside a rounded gradient."""
    N, D, V = 2600, 256, 3000
    x = torch.randn(N, D, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(V, D, device="cuda") * D**-0.5).to(torch.float32 if float32 else torch.bfloat16)
    weight.requires_grad_()
    target = torch.randint(V, (N,), device="cuda")

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            loss = linear_cross_entropy(x, weight, target, workspace=5 << 20)
        return loss.detach(), *torch.autograd.grad(loss, (x, weight))

    graph, found = captured(step)
    assert not products if float32 else len(products) >= 3
    with torch.no_grad():
        for tensor in (target, x, weight):
            tensor.copy_(tensor.flip(0))
    graph.replay()
    assert all(map(torch.equal, found, step()))


def test_gluon_unsupported():
    exp_CV, x_CD = (each[0] for each in operands(16, 288, 24, 1))
    pair_VP = torch.empty(24, 144, device="cuda", dtype=torch.int32)
    low_VP = pair_VP.to(torch.uint16)
    taken = accumulators.pipelined
    assert taken(pair_VP, low_VP, exp_CV, x_CD)
    assert taken(pair_VP, pair_VP.to(torch.uint8), exp_CV, x_CD)
    assert not taken(pair_VP, low_VP, exp_CV[:0], x_CD[:0])
    assert not taken(pair_VP, low_VP, exp_CV.float(), x_CD)
    assert not taken(pair_VP, low_VP, exp_CV[:, 1:], x_CD)
    few = pair_VP[:, :8].contiguous()
    assert taken(few, few.to(torch.uint16), exp_CV, x_CD[:, :16])
    assert not taken(few, few.to(torch.uint8), exp_CV, x_CD[:, :16])


def test_gluon_too_small(monkeypatch):
    exp_CV, x_CD = (each[0] for each in operands(64, 256, 512, 1))
    pair_VP = torch.empty(512, 128, device="cuda", dtype=torch.int32)
    sums = pair_VP, pair_VP.to(torch.uint16)
    for fewest, worth in ((1 << 23, True), ((1 << 23) + 1, False)):
        monkeypatch.setattr(backend, "FEWEST", fewest)
        assert accumulators.pipelined(*sums, exp_CV, x_CD) == worth
