"""The path without a pass over the logits on a CPU with units for bfloat16."""

import contextlib
from dataclasses import replace

import pytest
import torch

import lowtide
from lowtide.core.bfloat16_units import gemm
from lowtide.memory import peak_memory
from lowtide.ops.linear_cross_entropy.planning import requirements
from lowtide.tools.bench.cases import CASES
from lowtide.tools.doctor.linear_cross_entropy import AskedLossCall
from tests.support.loss import (
    check,
    differentiate,
    fused,
    make_inputs,
    planned,
    smallest_workspace,
    workspace_for,
)

BF16 = torch.bfloat16
REDUCTIONS = ["mean", "sum", "none"]
KINDS = ["accumulate", "packed", "class_blocks"]


@pytest.fixture(autouse=True)
def _every_size(monkeypatch):
    if not gemm.available():
        pytest.skip("this CPU has no units for bfloat16, or there is no compiler")
    monkeypatch.setattr(requirements, "FEWEST_WEIGHTS", 0)


def is_kind(kind):
    return lambda plan: plan.cpu_exponentials and plan.weight_gradient == kind


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"z_loss": 0.01, "logit_scale": 0.7, "label_smoothing": 0.1},
        {"label_smoothing": 0.3},
        {"z_loss": 0.01, "logit_scale": 0.7, "softcap": 2.0},
        {"softcap": 30.0},
    ],
    ids=["plain", "options", "smoothing", "options and cap", "cap"],
)
@pytest.mark.parametrize("V", [502, 503])
def test_gradients_and_workspace(V, options, reduction, kind):
    rows, features = 1100 if kind == "accumulate" else 370, 160
    own = {"bias": "z_loss" in options, "class_weight": "z_loss" in options}
    inputs = make_inputs(rows, features, V, dtype=BF16, **own)
    told = {name: value for name, value in options.items() if name != "logit_scale"}
    workspace = workspace_for(inputs, is_kind("packed" if kind == "class_blocks" else kind), **told)
    # The most memory that still needs class blocks; with the least, blocks have a few numbers only.
    if kind == "class_blocks":
        workspace = workspace * 3 // 4
        assert is_kind(kind)(planned(inputs, workspace, **told))
    plan = planned(inputs, workspace, **told)
    assert plan.rows < rows or kind == "accumulate"
    upstream = torch.randn(rows) if reduction == "none" else -0.5
    actual = differentiate(fused, inputs, upstream, workspace=workspace, reduction=reduction, **options)
    check(actual, inputs, upstream=upstream, reduction=reduction, **options)
    gradients = sum(leaf.nbytes for leaf in inputs.leaves().values())
    for leaf in inputs.leaves().values():
        leaf.grad = None
    upstream = torch.as_tensor(upstream)
    with peak_memory("cpu") as peak:
        fused(inputs, workspace=workspace, reduction=reduction, **options).backward(upstream)
    assert peak.bytes <= workspace + gradients + 4 * inputs.target.numel()


@pytest.mark.parametrize("frozen", ["input", "linear_weight", "linear_bias"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.2}, {"softcap": 3.0}], ids=str)
def test_frozen_operands(reduction, frozen, options):
    inputs = make_inputs(300, 40, 301, dtype=BF16, bias=True)
    getattr(inputs, frozen).requires_grad_(False)
    assert planned(inputs, None, **options).cpu_exponentials
    check(
        differentiate(fused, inputs, reduction=reduction, **options), inputs, reduction=reduction, **options
    )


@pytest.mark.parametrize("class_weight", [False, True])
@pytest.mark.parametrize("options", [{"label_smoothing": 0.2}, {"softcap": 3.0}], ids=str)
def test_options_with_a_weight_by_columns(options, class_weight):
    inputs = make_inputs(90, 40, 301, dtype=BF16, class_weight=class_weight)
    inputs = replace(
        inputs, linear_weight=inputs.linear_weight.detach().t().contiguous().t().requires_grad_()
    )
    assert planned(inputs, None, **options).cpu_exponentials
    check(differentiate(fused, inputs, **options), inputs, **options)


@pytest.mark.parametrize(
    ("N", "D", "V"), [(1, 1, 1), (370, 1, 2), (300, 7, 1), (1, 33, 1025), (64, 700, 130)]
)
def test_odd_shapes(N, D, V):
    inputs = make_inputs(N, D, V, dtype=BF16, ignored=0.0)
    assert planned(inputs, None).cpu_exponentials
    check(differentiate(fused, inputs), inputs, factor=4.0 if N * D < 100 else 2.0)


def test_class_split_in_two_parts():
    inputs = make_inputs(40, 1024, 1, dtype=BF16, ignored=0.0)
    workspace = workspace_for(inputs, is_kind("packed"))
    check(differentiate(fused, inputs, workspace=workspace), inputs)


def with_strides(inputs, *strides):
    """The same numbers in a weight of other strides, with gaps that hold nan."""
    weight = inputs.linear_weight.detach()
    size = 1 + sum((length - 1) * stride for length, stride in zip(weight.shape, strides))
    memory = torch.full((size,), torch.nan, dtype=weight.dtype)
    changed = memory.as_strided(weight.shape, strides).copy_(weight).requires_grad_()
    return replace(inputs, linear_weight=changed)


@pytest.mark.parametrize(
    ("kind", "N", "D", "V"),
    [
        ("class_blocks", 64, 40, 301),
        ("class_blocks", 90, 700, 1031),
        ("packed", 200, 601, 302),
        ("single_product", 33, 601, 302),
        ("single_product", 70, 33, 1500),
    ],
)
def test_weight_by_columns(kind, N, D, V):
    """As a weight of a layer that multiplies x W has it, with and without gaps between columns."""
    inputs = make_inputs(N, D, V, dtype=BF16, bias=True)
    if kind == "class_blocks":
        workspace = smallest_workspace(lambda workspace: planned(inputs, workspace)) * 3 // 2
    else:
        workspace = workspace_for(inputs, is_kind(kind))
    expected = differentiate(fused, inputs, workspace=workspace)
    for gap in (0, 3):
        turned = with_strides(inputs, 1, V + gap)
        assert is_kind(kind)(planned(turned, workspace))
        found = differentiate(fused, turned, workspace=workspace)
        assert all(torch.equal(found[name], each) for name, each in expected.items())


def test_weight_by_neither_other_engine():
    inputs = with_strides(make_inputs(64, 40, 301, dtype=BF16), 2, 700)
    assert not planned(inputs, None).cpu_exponentials
    check(differentiate(fused, inputs), inputs)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_logits_far_above_the_targets(reduction):
    """The first reference, the target's logit, is 200 below: exp(200) is no float32."""
    x, w = torch.ones(8, 16, dtype=BF16), torch.zeros(50, 16, dtype=BF16)
    w[3] = 12.5
    inputs = replace(
        make_inputs(8, 16, 50, dtype=BF16),
        input=x.requires_grad_(),
        linear_weight=w.requires_grad_(),
        target=torch.tensor([3, 4, 5, 3, 49, 0, 1, -100]),
    )
    actual = differentiate(fused, inputs, reduction=reduction)
    check(actual, inputs, reduction=reduction)
    loss = actual["loss"] if reduction == "none" else actual["loss"][None]
    assert loss.max() == pytest.approx(200.0 if reduction == "none" else 1000 / 7, rel=1e-6)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nonfinite_reaches_loss(value):
    inputs = make_inputs(20, 16, 50, dtype=BF16, ignored=0.0)
    with torch.no_grad():
        inputs.input[5, 2] = value
    loss_N = fused(inputs, reduction="none").detach()
    assert not loss_N[5].isfinite()
    assert loss_N[torch.arange(20) != 5].isfinite().all()


def test_confident_token_digits():
    """p = 1 - 1e-9: the loss is S / (1 + S), not a difference of numbers near 1."""
    x, w = torch.ones(4, 4, dtype=BF16), torch.zeros(2, 4, dtype=BF16)
    w[0] = 5.1875
    loss = lowtide.linear_cross_entropy(x, w, torch.zeros(4, dtype=torch.long))
    exact = torch.tensor(-20.75, dtype=torch.float64).exp().log1p().item()
    assert loss.item() == pytest.approx(exact, rel=1e-6)


def test_no_grad_stores_no_exponentials():
    inputs = make_inputs(600, 64, 5000, dtype=BF16)
    expected = fused(inputs).item()
    with torch.no_grad(), peak_memory("cpu") as peak:
        loss = fused(inputs)
    assert peak.bytes < 600 * 5000
    assert loss.item() == expected


def test_result_matches_logits_engine(monkeypatch):
    """Within what rounds either; without units, or with too few weights, that one is taken."""
    inputs = make_inputs(200, 64, 1000, dtype=BF16)
    ours = differentiate(fused, inputs)
    monkeypatch.setattr(gemm, "against", lambda: "of a test")
    assert not planned(inputs, None).cpu_exponentials
    theirs = differentiate(fused, inputs)
    for name, tensor in theirs.items():
        error = (ours[name].double() - tensor.double()).norm() / tensor.double().norm()
        assert error <= (1e-6 if name == "loss" else 4e-3)
    assert planned(inputs, None).compute_dtype == torch.float32


def test_engine_chosen():
    def taken(**options):
        log_probs = options.pop("log_probs", False)
        made = {name: options.pop(name) for name in ("probabilities", "logit_scale") if name in options}
        return planned(make_inputs(dtype=BF16, **made), None, log_probs=log_probs, **options).cpu_exponentials

    assert taken()
    assert taken(z_loss=0.1, label_smoothing=0.1)
    assert taken(z_loss=0.1, softcap=3.0)
    assert not taken(label_smoothing=0.1, softcap=3.0)
    assert not taken(softcap=1e-40)
    assert not taken(softcap=1e35)
    assert not taken(log_probs=True)
    assert not taken(probabilities=True)
    assert not taken(logit_scale=True)
    for dtype in (torch.float32, torch.float16, torch.float64):
        assert not planned(make_inputs(dtype=dtype), None).cpu_exponentials


def test_small_heads_other_engine(monkeypatch):
    monkeypatch.undo()
    assert not planned(make_inputs(8, 64, 1023, dtype=BF16), None).cpu_exponentials
    assert planned(make_inputs(8, 64, 1024, dtype=BF16), None).cpu_exponentials


def test_autocast():
    """An input in float32 is rounded, as autocast would. (A float32 weight would be copied.)"""
    inputs = make_inputs(300, 40, 301, dtype=BF16)
    with torch.no_grad():
        below = inputs.input.float() * (1 + 2.0**-12)
    expected = differentiate(fused, inputs)
    inputs = replace(inputs, input=below.requires_grad_())
    with torch.autocast("cpu", dtype=BF16):
        found = differentiate(fused, inputs)
    assert found["input"].dtype == torch.float32
    for name, tensor in found.items():
        assert torch.equal(tensor.to(expected[name].dtype), expected[name])


@contextlib.contextmanager
def off(monkeypatch, wanted=True):
    """As if the products could not be made, or oneDNN were switched off."""
    with monkeypatch.context() as patch:
        if wanted:
            patch.setattr(gemm, "against", lambda: "of a test")
        yield


@pytest.mark.extended
@pytest.mark.parametrize("made_off", [False, True])
def test_compile(monkeypatch, made_off):
    """A graph keeps the way that it was made for, as its outputs' dtypes depend on it: rows of such
    a head are summed in float32 on one way, and in part in the gradient's memory on the other."""
    torch.compiler.reset()
    inputs, whole = make_inputs(1100, 512, 4096, dtype=BF16), 35 << 19
    assert planned(inputs, whole).weight_gradient == "accumulate"
    with off(monkeypatch):
        assert planned(inputs, whole).weight_gradient == "packed"
        other = differentiate(fused, inputs, workspace=whole)
    expected = differentiate(fused, inputs, workspace=whole)
    compiled = torch.compile(fused, backend="aot_eager", fullgraph=True, dynamic=True)
    with off(monkeypatch, made_off):
        first = differentiate(compiled, inputs, workspace=whole)
    with off(monkeypatch, not made_off):
        second = differentiate(compiled, inputs, workspace=whole)
    for name, tensor in (other if made_off else expected).items():
        assert torch.equal(first[name], tensor)
        assert torch.equal(second[name], tensor)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_backward_engine_of_forward(monkeypatch, where):
    """What is kept of a row differs on the other, which shows where targets' logits are largest."""
    inputs = make_inputs(100, 40, 301, dtype=BF16, ignored=0.0, scale=6.0)
    target = (inputs.input @ inputs.linear_weight.t()).argmax(1)
    inputs = replace(inputs, target=target)
    with off(monkeypatch, where == "forward"):
        loss = fused(inputs, reduction="none")
    upstream = torch.ones_like(loss)
    with off(monkeypatch, where == "backward"):
        found = torch.autograd.grad(loss, list(inputs.leaves().values()), upstream)
    actual = dict(zip(inputs.leaves(), found)) | {"loss": loss.detach()}
    check(actual, inputs, upstream=upstream, reduction="none")


def test_saved_graph_without_library(monkeypatch):
    inputs = make_inputs(20, 40, 301, dtype=BF16)
    monkeypatch.setattr(gemm, "_library", lambda: "this processor has no units")
    monkeypatch.setattr(gemm, "against", lambda: None)
    with pytest.raises(RuntimeError, match="here this processor has no units"):
        fused(inputs)


def test_masked_target_with_z_loss():
    inputs = make_inputs(20, 16, 50, dtype=BF16, bias=True, ignored=0.0)
    with torch.no_grad():
        inputs.linear_bias[inputs.target[3]] = -torch.inf
    actual = differentiate(fused, inputs, z_loss=0.1, reduction="none")
    assert actual["loss"][3] == torch.inf
    for name in ("input", "linear_weight"):
        assert actual[name].isfinite().all()


def test_positions():
    x, w = make_inputs(200, 40, 300, dtype=BF16).input, torch.randn(300, 3, 40).to(BF16).requires_grad_()
    target = torch.randint(300, (200, 3))
    loss = lowtide.linear_cross_entropy(x, w, target)
    found = torch.autograd.grad(loss, (x, w))
    exact = [each.detach().double().requires_grad_() for each in (x, w)]
    logits = torch.einsum("nd,vpd->nvp", *exact)
    want = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, target), exact)
    for ours, theirs in zip(found, want):
        assert (ours.double() - theirs).norm() <= 2.9e-3 * theirs.norm()


def test_doctor_names_engine(monkeypatch):
    found = AskedLossCall(N=64, D=40, V=300, dtype=BF16, device="cpu").describe()
    assert found["engine"] == "cpu_exponentials"
    assert found["kernels"] == "C++, with oneDNN's bfloat16 products; no pass over the logits"
    assert found["products in"] == "bfloat16"
    assert "why" not in found
    monkeypatch.setattr(gemm, "against", lambda: "g++ could not compile them")
    found = AskedLossCall(N=64, D=40, V=300, dtype=BF16, device="cpu").describe()
    assert found["engine"] == "logits_torch"
    assert found["why"] == "not cpu_exponentials: g++ could not compile them"


def test_benchmark_shape():
    (case,) = (case for case in CASES if case.name == "cpu-bf16")
    x, w = (torch.zeros(1, dtype=BF16).expand(size, case.features) for size in (case.tokens, case.classes))
    w = torch.empty(case.classes, case.features, dtype=BF16)
    inputs = replace(make_inputs(), input=x.requires_grad_(), linear_weight=w.requires_grad_())
    plan = planned(inputs, None)
    assert plan.weight_gradient == "packed"
    assert plan.rows >= 400
