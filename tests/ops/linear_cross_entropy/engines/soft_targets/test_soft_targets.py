"""The engine of class probabilities keeps distances from the largest logits in 16 bits.

On a card as it is; on the CPU through the interpreter, on float32 operands, in small tiles.
"""

from dataclasses import replace

import pytest
import torch

from lowtide.memory import peak_memory
from tests.support.cuda_graphs import captured
from tests.support.extended import all_extended_but
from tests.support.loss import (
    check,
    differentiate,
    fused,
    make_inputs,
    norm,
    planned,
    smallest_workspace,
    workspace_for,
)
from tests.support.rehearsals import in_rehearsal

pytest.importorskip("triton")

from lowtide.ops.linear_cross_entropy.dispatch import cross_entropy
from lowtide.ops.linear_cross_entropy.engines.formulas.row_math import (
    LogitTransform,
    RowCoefs,
    SoftmaxStats,
    TileColumns,
)
from lowtide.ops.linear_cross_entropy.engines.soft_targets import engine, softmax_triton
from tests.ops.linear_cross_entropy.on_exponentials import dtype_on, everywhere, several_blocks  # noqa: F401
from tests.ops.linear_cross_entropy.options.test_several_terms import in_terms

# The interpreter computes with numpy, which warns of inf - inf.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

# The arguments of make_inputs, and the options of the call.
KINDS = {
    "probabilities": ({"probabilities": True}, {}),
    "smoothed": ({"probabilities": True, "class_weight": True}, {"label_smoothing": 0.1}),
    "all": (
        {"probabilities": True, "class_weight": True, "bias": True},
        {"label_smoothing": 0.1, "logit_scale": 0.7, "z_loss": 0.02},
    ),
}
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def chunks(everywhere, monkeypatch):  # noqa: F811
    """The number of terms of each chunk that this engine ran."""
    found, gradient = [], engine.SoftTargetsEngine.chunk_gradient_

    def counted(self, z_CV, chunks, *arguments):
        if not in_rehearsal():
            found.append(len(chunks))
        return gradient(self, z_CV, chunks, *arguments)

    monkeypatch.setattr(engine.SoftTargetsEngine, "chunk_gradient_", counted)
    return found


def of_kind(kind, device, N=37, V=112, **changes):
    made, options = KINDS[kind]
    dtype = changes.pop("dtype", dtype_on(device))
    return make_inputs(N, 24, V, device=device, dtype=dtype, **{**made, **changes}), options


def run(inputs, *, upstream=1.0, factor=2.0, **options):
    found = differentiate(fused, inputs, upstream, backend="triton", **options)
    check(found, inputs, upstream=upstream, factor=factor, **options)


@kinds
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_target_kinds(device, chunks, kind, reduction):
    inputs, options = of_kind(kind, device)
    upstream = torch.randn(inputs.leading, device=device) if reduction == "none" else -0.5
    run(inputs, reduction=reduction, upstream=upstream, **options)
    assert chunks == [1] if reduction == "mean" else chunks == [1, 1]  # forward; and backward


@pytest.mark.parametrize("kind", all_extended_but(["all"], KINDS))
def test_several_chunks(device, chunks, kind):
    inputs, options = of_kind(kind, device, N=70)
    small = {name: value for name, value in options.items() if name != "logit_scale"}
    workspace = workspace_for(inputs, lambda plan: plan.rows >= 18, backend="triton", **small)
    run(inputs, workspace=workspace, **options)
    assert len(chunks) >= 3


@pytest.mark.parametrize("kind", all_extended_but(["smoothed"], KINDS))
def test_class_blocks(device, kind):
    """A bfloat16 weight with no float32 sum. The interpreter truncates: twice the rounding."""
    N, V = several_blocks(device)
    V += -V % 16
    inputs, options = of_kind(kind, device, N=N, V=V, dtype=torch.bfloat16)
    inputs = replace(inputs, target=inputs.target.to(dtype_on(device)))
    planned_options = {name: value for name, value in options.items() if name != "logit_scale"}
    least = smallest_workspace(lambda bytes: planned(inputs, bytes, backend="triton", **planned_options))
    plan = planned(inputs, least + 20_000, backend="triton", **planned_options)
    assert plan.weight_gradient == "class_blocks"
    assert plan.soft_targets
    assert plan.block_classes < V
    assert plan.rows < N
    run(inputs, workspace=least + 20_000, factor=2.0 if device == "cuda" else 4.0, **options)


@pytest.mark.parametrize("kind", all_extended_but(["probabilities"], KINDS))
def test_weight_gradient_in_24_bits(device, chunks, kind):
    """A bfloat16 weight leaves room for more rows at a time; the last product rounds."""
    inputs, options = of_kind(kind, device, N=1100 if device == "cuda" else 150, dtype=torch.bfloat16)
    inputs = replace(inputs, target=inputs.target.to(dtype_on(device)))
    small = {name: value for name, value in options.items() if name != "logit_scale"}
    workspace = workspace_for(
        inputs, lambda plan: plan.weight_gradient == "packed", backend="triton", **small
    )
    assert planned(inputs, workspace, backend="triton", **small).soft_targets
    run(inputs, workspace=workspace, factor=2.0 if device == "cuda" else 4.0, **options)
    assert len(chunks) >= 2


@pytest.mark.parametrize("kind", ["probabilities", "all"])
def test_two_terms(device, chunks, kind):
    made, options = KINDS[kind]
    inputs = make_inputs(37, 32, 112, device=device, dtype=dtype_on(device), **made)
    found = differentiate(in_terms(cross_entropy, (24, 8)), inputs, backend="triton", **options)
    check(found, inputs, **options)
    assert chunks == [2]


@pytest.mark.parametrize("kind", all_extended_but(["probabilities"], KINDS))
def test_no_grad_same_loss(device, chunks, kind):
    inputs, options = of_kind(kind, device)
    with_gradients = fused(inputs, backend="triton", **options)
    with torch.no_grad():
        assert torch.equal(fused(inputs, backend="triton", **options), with_gradients)
    assert len(chunks) == 2


@pytest.mark.parametrize("width", [16, 208, 256])
def test_tiles_cut_and_whole(device, width):
    """A row's last tile reaches beyond its classes, or does not; and a class that is excluded."""
    inputs, _ = of_kind("probabilities", device, V=width, bias=True)
    bias = inputs.linear_bias.detach().clone()
    bias[1] = -torch.inf
    target = inputs.target.clone()
    target[:, 1] = 0
    run(replace(inputs, linear_bias=bias.requires_grad_(), target=target))


@pytest.mark.parametrize("size", [30.0, 3000.0])
def test_logits_of_any_size(device, size):
    """Each tile has its sums relative to its own largest logit."""
    inputs, _ = of_kind("probabilities", device, scale=size)
    run(inputs)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nonfinite_reaches_loss(device, value):
    inputs, _ = of_kind("probabilities", device)
    with torch.no_grad():
        inputs.input[3, 2] = value
    assert fused(inputs, backend="triton").isnan()
    rows = fused(inputs, backend="triton", reduction="none")
    assert rows.isnan().nonzero().flatten().tolist() == [3]


def laid_out(target_NV, layout):
    N, V = target_NV.shape
    if layout == "classes first":
        return target_NV.t().contiguous().t()
    if layout == "one for all rows":
        return target_NV[:1].expand(N, V)
    if layout == "of longer rows":
        return torch.cat([target_NV, target_NV], 1)[:, :V]
    return torch.cat([target_NV.new_zeros(1), target_NV.flatten()])[1:].view(N, V)


@pytest.mark.parametrize(
    "layout", ["classes first", "one for all rows", "of longer rows", "after one number"]
)
def test_probabilities_of_any_strides(device, chunks, layout):
    inputs, _ = of_kind("probabilities", device)
    run(replace(inputs, target=laid_out(inputs.target, layout)))
    assert chunks == [1]


def test_leading_dimensions(device, chunks):
    inputs, _ = of_kind("probabilities", device, N=24)
    leading = replace(
        inputs,
        input=inputs.input.detach().view(2, 3, 4, 24).requires_grad_(),
        target=inputs.target.view(2, 4, 3, 112).transpose(1, 2),
    )
    run(leading)
    assert chunks == [1]


def test_other_engine_chosen(device, chunks):
    """More digits than the operands have, which may be nearer to p than a distance says; and rows
    that are not loaded several classes at a time."""
    inputs, _ = of_kind("probabilities", device)
    finer = torch.float32 if device == "cuda" else torch.float64
    for other in (
        replace(inputs, target=inputs.target.to(finer)),
        replace(inputs, target=inputs.target.half()),
        of_kind("probabilities", device, V=101)[0],
    ):
        assert not planned(other, None, backend="triton").soft_targets
        found = differentiate(fused, other, backend="triton")
        check(found | {"loss": found["loss"].to(other.sum_dtype)}, other)
    assert chunks == []


@pytest.mark.parametrize("near", [None, 0.01], ids=["far", "near"])
@pytest.mark.parametrize("size", [2.0, 60.0])
def test_accuracy_of_16_bits(device, size, near):
    """Of each gradient: half a step of its distance, and rounding the whole, also with y near p.
    (The interpreter truncates to bfloat16.)"""
    C, D, V = 37, 24, 208
    x_CD, weight_VD = torch.randn(C, D, device=device), torch.randn(V, D, device=device) * size / D**0.5
    x_CD, weight_VD = (each.to(dtype_on(device)) for each in (x_CD, weight_VD))
    noise_CV = torch.randn(C, V, device=device)
    if near is not None:
        noise_CV = noise_CV * near + (x_CD.float() @ weight_VD.float().T)
    soft_CV = noise_CV.softmax(1).to(dtype_on(device))
    place_CV = torch.empty(C, V, dtype=torch.bfloat16, device=device)
    columns = TileColumns(0, LogitTransform(), soft_CB=soft_CV)
    nothing_C = torch.zeros(C, device=device)
    terms = RowCoefs(
        nothing_C, nothing_C, nothing_C, nothing_C, soft_target_coef_N=torch.ones_like(nothing_C)
    )
    statistics = SoftmaxStats(*(torch.empty(C, device=device) for _ in range(2)))
    statistics = replace(statistics, soft_mass_N=nothing_C, soft_nll_N=nothing_C.clone())
    found = engine.distances([(x_CD, weight_VD)], columns, place_CV)
    softmax_triton.gradient(found, place_CV, terms, statistics, columns, take_stats=True)
    z_CV = x_CD.double() @ weight_VD.double().T
    y_CV = soft_CV.double()
    p_CV = z_CV.softmax(1) * y_CV.sum(1, keepdim=True)  # the sum is 1 up to y's rounding
    exact_CV = p_CV - y_CV
    far_CV = z_CV.amax(1, keepdim=True) - z_CV > 64
    allowed_CV = 5e-4 * p_CV + (2**-8 if device == "cuda" else 2**-7) * (exact_CV.abs() + 5e-4 * p_CV)
    error_CV = (place_CV.double() - exact_CV).abs()
    # The rounding of logits and of y, and the smallest float32.
    float32_CV = 2**-22 * (z_CV.abs().amax() * p_CV + y_CV) + 2**-126
    assert (error_CV <= allowed_CV + far_CV * p_CV + float32_CV).all()
    assert size < 60 or far_CV.any()
    exact_loss_C = (y_CV * (z_CV.logsumexp(1, keepdim=True) - z_CV)).sum(1)
    torch.testing.assert_close(statistics.soft_nll_N.double(), exact_loss_C, rtol=3e-6, atol=2**-22)


@pytest.mark.parametrize("kind", all_extended_but(["probabilities"], KINDS))
def test_same_call_same_bits(device, kind):
    inputs, options = of_kind(kind, device)
    first, second = (differentiate(fused, inputs, backend="triton", **options) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("reduction", all_extended_but(["mean"], ["mean", "none"]))
@pytest.mark.parametrize("kind", all_extended_but(["probabilities"], KINDS))
def test_memory(device, chunks, kind, reduction):
    """The workspace, the gradients and the loss, whatever the logits take."""
    N, V = (64, 16384) if device == "cuda" else (32, 112)
    inputs, options = of_kind(kind, device, N=N, V=V)
    small = {name: value for name, value in options.items() if name != "logit_scale"}
    workspace = workspace_for(inputs, lambda plan: plan.rows >= 8, backend="triton", **small)
    options = {**options, "backend": "triton", "reduction": reduction, "workspace": workspace}
    leaves = tuple(inputs.leaves().values())
    upstream = torch.ones(N if reduction == "none" else (), device=device)
    for _ in range(2):  # the first compiles
        chunks.clear()
        with peak_memory(device) as peak:
            loss = fused(inputs, **options)
            torch.autograd.grad(loss, leaves, upstream)
    assert len(chunks) > 1
    gradients = sum(leaf.nbytes for leaf in leaves)
    assert peak.bytes <= options["workspace"] + gradients + loss.nbytes


@pytest.mark.parametrize("reduction", ["mean", "none"])
@kinds
def test_cuda_graph(device, chunks, kind, reduction):
    if device == "cpu":
        pytest.skip("there are none")
    inputs, options = of_kind(kind, device)
    leaves = tuple(inputs.leaves().values())

    def step():
        loss = fused(inputs, reduction=reduction, **options)
        return loss.detach(), *torch.autograd.grad(loss.sum(), leaves)

    graph, found = captured(step)
    assert chunks
    with torch.no_grad():
        for tensor in (inputs.target, *leaves):
            tensor.copy_(tensor.flip(0))
    graph.replay()
    assert all(map(torch.equal, found, step()))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_more_logits_than_int32(device, chunks, reduction):
    """N V is 2^31 and more in one chunk: the last rows are the same as alone."""
    if device == "cpu" or torch.cuda.mem_get_info()[0] < 14 << 30:
        pytest.skip("needs 14 GiB of a card")
    N, V, few = (1 << 14) + 128, 1 << 17, 128
    inputs, _ = of_kind("probabilities", device, N=few, V=V)
    x_ND = torch.randn(N, 24, device=device).to(inputs.input.dtype)
    target_NV = torch.rand(N, V, dtype=x_ND.dtype, device=device).div_(V / 2)
    whole = replace(inputs, input=x_ND.requires_grad_(), target=target_NV)
    alone = replace(inputs, input=x_ND.detach()[-few:].clone().requires_grad_(), target=target_NV[-few:])
    found = differentiate(fused, whole, workspace=5 * N * V, reduction=reduction)
    assert chunks == ([1] if reduction == "mean" else [1, 1])
    part = differentiate(fused, alone, reduction=reduction)
    share = few / N if reduction == "mean" else 1.0
    tail = found["input"][-few:].float() / share
    assert norm(tail - part["input"].float()) <= 1e-2 * norm(part["input"].float())
    if reduction == "none":
        torch.testing.assert_close(found["loss"][-few:], part["loss"], rtol=1e-5, atol=1e-5)
    assert found["linear_weight"].isfinite().all()
