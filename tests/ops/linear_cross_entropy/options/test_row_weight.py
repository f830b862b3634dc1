"""row_weight, a factor of each row's loss: beside every option, on every engine and derivative.

Shapes: N tokens, D features, V classes, P positions.
"""

import re
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import lowtide
from lowtide.memory import peak_memory
from lowtide.ops.linear_cross_entropy.definition.head import Options
from lowtide.ops.linear_cross_entropy.dispatch import cross_entropy
from lowtide.ops.linear_cross_entropy.engines.cpu_exponentials import spec as cpu_spec
from lowtide.ops.linear_cross_entropy.engines.cpu_exponentials.gemm import gemm
from lowtide.ops.linear_cross_entropy.operator.fake import with_new_graph_facts, workspace_of
from tests.ops.linear_cross_entropy import kinds
from tests.ops.linear_cross_entropy.calls import make_call
from tests.ops.linear_cross_entropy.on_exponentials import (
    dtype_on,
    put_everywhere,
    run,
    several_blocks,
    with_options,
)
from tests.ops.linear_cross_entropy.options.test_options import DTYPES, KINDS, REDUCTIONS, check_fused
from tests.ops.linear_cross_entropy.options.test_options import workspace_of as few
from tests.ops.linear_cross_entropy.options.test_several_terms import in_terms
from tests.support.extended import all_extended_but
from tests.support.loss import (
    HALVES,
    check,
    dense,
    differentiate,
    fused,
    make_inputs,
    planned,
    skip_unless_runnable,
    smallest_workspace,
    workspace_for,
)

pytestmark = [
    # Triton's interpreter computes with numpy, which warns of inf - inf.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    # torch.func.jvp, the compiler and the exporter import torch.jit and others, which are
    # deprecated.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
ALL = ["all, classes", "all, probabilities"]
OPERATORS = torch.ops.lowtide


def weighted(*sizes, kind="plain", **changes):
    """Make inputs of a kind with row weights, and return them with the kind's options."""
    made, options = {**KINDS, "plain": ({}, {})}[kind]
    return make_inputs(*sizes, row_weight=True, **made | changes), options


def upstream_of(inputs, reduction):
    return torch.randn(inputs.leading, device=inputs.input.device) if reduction == "none" else -0.7


# Each engine.


@pytest.mark.parametrize("workspace", ["default", "few"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", ["plain", *KINDS])
def test_with_each_option(device, kind, reduction, dtype, workspace):
    inputs, options = weighted(device=device, dtype=dtype, kind=kind)
    for backend in ("auto", "torch") if device == "cuda" else ("torch",):
        chosen = options | {"reduction": reduction, "backend": backend}
        upstream = upstream_of(inputs, reduction)
        check_fused(inputs, upstream, workspace=few(workspace, inputs, **chosen), **chosen)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", ["plain", *ALL])
def test_triton(device, kind, reduction, dtype):
    skip_unless_runnable("triton", device)
    inputs, options = weighted(5, 3, 21, device=device, dtype=dtype, kind=kind, ignored=0.4)
    chosen = options | {"reduction": reduction, "backend": "triton"}
    check_fused(inputs, upstream_of(inputs, reduction), **chosen)


SHIFTED = [
    {},
    {"z_loss": 0.02, "label_smoothing": 0.3, "logit_scale": -1.3},
    {"z_loss": 0.02, "softcap": 5.0, "logit_scale": 1.7},
]


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("options", SHIFTED, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_exponentials(device, reduction, options, learned, monkeypatch):
    pytest.importorskip("triton")
    put_everywhere(device, monkeypatch)
    inputs, options, upstream = with_options(device, options, reduction, learned, D=24)
    row_weight = make_inputs(len(inputs.target), device=device, row_weight=True, ignored=0).row_weight
    inputs = replace(inputs, row_weight=row_weight.masked_fill(inputs.target < 0, torch.nan))
    run(inputs, reduction=reduction, upstream=upstream, **options)


@pytest.mark.parametrize("options", all_extended_but(SHIFTED[1:], SHIFTED), ids=str)
@pytest.mark.parametrize("reduction", all_extended_but(["mean", "none"], REDUCTIONS))
def test_class_blocks(device, reduction, options, monkeypatch):
    """The float32 sum of the weight's gradient does not fit."""
    pytest.importorskip("triton")
    put_everywhere(device, monkeypatch)
    made = {"bias": True, "logit_scale": True, "row_weight": True}
    N, V = several_blocks(device)
    inputs = make_inputs(N, 24, V, device=device, dtype=torch.bfloat16, **made)
    options = {name: value for name, value in options.items() if name != "logit_scale"}
    workspace = 20_000 + smallest_workspace(lambda size: planned(inputs, size, backend="triton", **options))
    assert planned(inputs, workspace, backend="triton", **options).weight_gradient == "class_blocks"
    upstream, factor = upstream_of(inputs, reduction), 2.0 if device == "cuda" else 4.0
    run(inputs, reduction=reduction, upstream=upstream, workspace=workspace, factor=factor, **options)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_soft_targets(device, reduction, monkeypatch):
    pytest.importorskip("triton")
    put_everywhere(device, monkeypatch)
    made = {"probabilities": True, "class_weight": True, "bias": True, "row_weight": True}
    inputs = make_inputs(37, 24, 112, device=device, dtype=dtype_on(device), **made)
    chosen = {"label_smoothing": 0.1, "z_loss": 0.02, "reduction": reduction, "backend": "triton"}
    assert planned(inputs, None, **chosen).soft_targets
    check_fused(inputs, upstream_of(inputs, reduction), **chosen)


@pytest.mark.parametrize("weight_gradient", ["accumulate", "packed", "class_blocks"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_cpu_exponentials(reduction, weight_gradient, monkeypatch):
    if not gemm.available():
        pytest.skip("this CPU has no units for bfloat16, or there is no compiler")
    monkeypatch.setattr(cpu_spec, "FEWEST_WEIGHTS", 0)
    made = {"bias": True, "class_weight": True, "row_weight": True}
    inputs = make_inputs(
        1100 if weight_gradient == "accumulate" else 370, 160, 503, dtype=torch.bfloat16, **made
    )
    kind = "packed" if weight_gradient == "class_blocks" else weight_gradient
    workspace = workspace_for(inputs, lambda plan: plan.weight_gradient == kind, z_loss=0.01)
    workspace = workspace * 3 // 4 if weight_gradient == "class_blocks" else workspace
    plan = planned(inputs, workspace, z_loss=0.01)
    assert plan.cpu_exponentials
    assert plan.weight_gradient == weight_gradient
    check_fused(inputs, upstream_of(inputs, reduction), reduction=reduction, z_loss=0.01, workspace=workspace)


@pytest.mark.parametrize("kind", ["plain", *KINDS])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_reference(device, reduction, kind):
    inputs, options = weighted(device=device, dtype=torch.float64, kind=kind)
    check_fused(inputs, upstream_of(inputs, reduction), reduction=reduction, backend="reference", **options)


@pytest.mark.parametrize("widths", [(8, 11), (16, 1, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_several_terms(device, reduction, dtype, widths):
    inputs, options = weighted(device=device, dtype=dtype, kind="all, classes")
    options = options | {"reduction": reduction}
    upstream = upstream_of(inputs, reduction)
    check(
        differentiate(in_terms(cross_entropy, widths), inputs, upstream, **options),
        inputs,
        upstream=upstream,
        **options,
    )


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_autocast(device, reduction, dtype):
    inputs, options = weighted(device=device, dtype=dtype, bias=True)
    wide = inputs.to(torch.float32)
    with torch.autocast(device, dtype):
        found = differentiate(fused, wide, -0.7, reduction=reduction, **options)
    found = {name: each if name == "loss" else each.to(dtype) for name, each in found.items()}
    check(found, inputs, upstream=-0.7, reduction=reduction, **options)


# Values and kinds of a weight.


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", ["plain", *ALL])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_1(device, dtype, kind, reduction):
    inputs, options = weighted(device=device, dtype=dtype, kind=kind)
    one, none = (replace(inputs, row_weight=each) for each in (torch.ones_like(inputs.row_weight), None))
    found, expected = (differentiate(fused, each, reduction=reduction, **options) for each in (one, none))
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", ALL)
def test_weight_of_0(device, kind, reduction):
    inputs, options = weighted(device=device, kind=kind)
    found = differentiate(fused, inputs, reduction=reduction, **options)
    none_N = inputs.row_weight == 0
    assert none_N.sum() > 2
    assert not found["input"][none_N].any()
    if reduction == "none":
        assert not found["loss"][none_N].any()


def test_mean_denominator_without_weights(device):
    for class_weight in (False, True):
        inputs, _ = weighted(device=device, dtype=torch.float64, class_weight=class_weight)
        counted_N = inputs.target >= 0
        divisor = inputs.weight[inputs.target[counted_N]].sum() if class_weight else counted_N.sum()
        mean, total = (fused(inputs, reduction=reduction) for reduction in ("mean", "sum"))
        torch.testing.assert_close(mean, total / divisor, rtol=1e-13, atol=0)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_weight_of_ignored_row_not_used(device, reduction):
    inputs, options = weighted(device=device, kind="all, classes")
    assert inputs.row_weight.isnan().any()
    for backend in ("auto", "reference"):
        found = differentiate(fused, inputs, reduction=reduction, backend=backend, **options)
        assert all(each.isfinite().all() for each in found.values())


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_no_valid_rows(device, reduction):
    inputs, _ = weighted(9, device=device, ignored=1.0)
    found = differentiate(fused, inputs, reduction=reduction)
    loss = found.pop("loss")
    assert loss.isnan() if reduction == "mean" else not loss.any()
    assert not any(each.any() for each in found.values())


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weights", DTYPES)
def test_weights_of_other_dtype(device, weights, reduction):
    """The loss keeps its own dtype."""
    for dtype in (torch.float32, torch.bfloat16):
        inputs, _ = weighted(device=device, dtype=dtype)
        inputs = replace(inputs, row_weight=inputs.row_weight.to(weights))
        found = differentiate(fused, inputs, -0.7, reduction=reduction)
        wide = replace(inputs, row_weight=inputs.row_weight.float())
        check(found, wide, upstream=-0.7, reduction=reduction)


@pytest.mark.parametrize("magnitude", [1e-6, 1e5])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_weights_of_any_size(device, reduction, dtype, magnitude):
    """A float16 gradient is formed near the middle of its range."""
    inputs, _ = weighted(device=device, dtype=dtype)
    inputs = replace(inputs, row_weight=inputs.row_weight.float() * magnitude)
    upstream = 0.1 / magnitude
    found = differentiate(fused, inputs, upstream, reduction=reduction)
    check(found, inputs, upstream=upstream, reduction=reduction)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", ALL)
def test_leading_dimensions_and_strides(device, kind, reduction):
    for leading in ((), (1,), (2, 3), (2, 0)):
        N = torch.Size(leading).numel()
        inputs, options = weighted(N, 5, 7, device=device, kind=kind, ignored=0.0)
        target = inputs.target.view(*leading, 7) if inputs.probabilities else inputs.target.view(leading)
        row_weight = torch.randn(*leading, 2, device=device)[..., 0]
        x = inputs.input.detach().view(*leading, 5).requires_grad_()
        changed = replace(inputs, input=x, target=target, row_weight=row_weight)
        check_fused(changed, reduction=reduction, **options)
        check_fused(
            replace(changed, row_weight=torch.randn((), device=device).expand(leading)),
            reduction=reduction,
            **options,
        )


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("positions", [(), (2,)])
def test_no_classes(device, positions, reduction):
    """Without classes the loss of a row is 0, whatever its weight."""
    x, w = torch.randn(3, 2, device=device), torch.randn(0, *positions, 2, device=device)
    row_weight = torch.tensor([torch.nan, 0.5, 2.0], device=device)
    row_weight = row_weight.view(3, *(1 for _ in positions)).expand(3, *positions)
    ignored = torch.full((3, *positions), -100, device=device)
    probabilities = torch.ones(3, 0, *positions, device=device)
    for target, weight in ((ignored, row_weight), (probabilities, row_weight.nan_to_num(1))):
        if positions and target is ignored:
            continue  # an error, as in torch
        found = lowtide.linear_cross_entropy(x, w, target, reduction=reduction, row_weight=weight)
        expected = lowtide.linear_cross_entropy(x, w, target, reduction=reduction)
        assert torch.equal(found.isnan(), expected.isnan())
        assert not found.nan_to_num().any()


# K-dimensional loss.


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("probabilities", [False, True])
@pytest.mark.parametrize("positions", [(1,), (3,), (2, 2)])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_positions(device, reduction, positions, probabilities, backend):
    """One weight for each row and position."""
    made = {"bias": True, "class_weight": True, "probabilities": probabilities}
    call = make_call(positions, device=device, ignored=None if probabilities else -100, **made)
    options = {"label_smoothing": 0.1, "weight": call["weight"], "linear_bias": call["linear_bias"]}
    row_weight = torch.randn(6, *positions, dtype=torch.float64, device=device)
    counted = torch.ones_like(row_weight)
    if not probabilities:
        row_weight[call["target"] == -100] = torch.nan
        counted = call["weight"][call["target"].clamp(min=0)] * (call["target"] != -100)
    leaves = [call[name].requires_grad_() for name in ("input", "linear_weight")]
    plain = lowtide.linear_cross_entropy(*leaves, call["target"], reduction="none", **options)
    expected = plain * row_weight.nan_to_num(0)
    if reduction != "none":
        expected = expected.sum() / (counted.sum() if reduction == "mean" else 1)
    found = lowtide.linear_cross_entropy(
        *leaves, call["target"], reduction=reduction, row_weight=row_weight, backend=backend, **options
    )
    upstream = torch.randn_like(expected)
    ours, theirs = ((each, *torch.autograd.grad(each, leaves, upstream)) for each in (found, expected))
    for one, other in zip(ours, theirs):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


# Cost.


def test_products(device):
    """A mean or sum takes three products, and four if each row has its own upstream gradient."""
    inputs, _ = weighted(37, 19, 63, device=device)

    def products(reduction):
        with FlopCounterMode(display=False) as counter:
            fused(inputs, reduction=reduction).sum().backward()
        return counter.get_total_flops() / (2 * 37 * 19 * 63)

    assert [products(reduction) for reduction in REDUCTIONS] == [3, 3, 4]


@pytest.mark.parametrize("probabilities", all_extended_but([False], [False, True]))
@pytest.mark.parametrize("dtype", all_extended_but([torch.float32], [torch.float32, torch.bfloat16]))
@pytest.mark.parametrize("reduction", all_extended_but(["sum"], REDUCTIONS))
def test_memory(device, reduction, dtype, probabilities):
    """Row weights add only vectors of N numbers, in the workspace, and leave the plan alone."""
    N, D, V = 512, 4, 64
    inputs = make_inputs(N, D, V, device=device, dtype=dtype, probabilities=probabilities, row_weight=True)
    plain, peaks = replace(inputs, row_weight=None), []
    least = smallest_workspace(lambda size: fused(plain, reduction=reduction, workspace=size))
    assert least == smallest_workspace(lambda size: fused(inputs, reduction=reduction, workspace=size))
    for each in (plain, inputs):
        fused(each, reduction=reduction, workspace=least).sum().backward()
        for leaf in inputs.leaves().values():
            leaf.grad = None
        upstream = torch.ones(() if reduction != "none" else N, device=device)
        with peak_memory(device) as peak:
            loss = fused(each, reduction=reduction, workspace=least)
            loss.backward(upstream)
        peaks.append(peak.bytes)
        for leaf in inputs.leaves().values():
            leaf.grad = None
        assert peak.bytes <= least + sum(leaf.nbytes for leaf in inputs.leaves().values()) + loss.nbytes
    assert peaks[1] - peaks[0] <= 3 * 4 * N


def test_memory_matches_plan(device):
    inputs, options = make_inputs(device=device, row_weight=True), Options(workspace=1 << 20)
    head = [[inputs.input.detach()], [inputs.linear_weight.detach()], None, None, inputs.target, None]
    found = {
        workspace_of(
            "lowtide::linear_cross_entropy",
            with_new_graph_facts(
                "lowtide::linear_cross_entropy", (*head, each, None, (True, True, False, False), *options)
            ),
        )
        for each in (None, inputs.row_weight)
    }
    assert len(found) == 1


# Derivatives and transforms.


def small(device, kind):
    inputs, options = kinds.small(device, kind)
    row_weight = torch.linspace(-1, 1.5, 5, dtype=torch.float64, device=device)
    return replace(inputs, row_weight=row_weight), options


@pytest.mark.parametrize("kind", kinds.KINDS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_derivatives_first_and_second_order(device, reduction, kind):
    inputs, options = small(device, kind)
    loss, values = kinds.loss_of_leaves(inputs, reduction=reduction, **options)
    leaves = tuple(value.requires_grad_() for value in values)
    assert torch.autograd.gradcheck(loss, leaves, fast_mode=True, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(loss, leaves, fast_mode=True)


@pytest.mark.parametrize("kind", kinds.KINDS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("transform", ["grad", "jvp", "hessian", "create_graph"])
def test_transforms(device, transform, reduction, kind):
    inputs, options = small(device, kind)

    def transformed(loss_of):
        loss, values = kinds.loss_of_leaves(inputs, loss_of, reduction=reduction, **options)
        places = tuple(range(len(values)))
        if transform == "jvp":
            return torch.func.jvp(loss, values, tuple(value.cos() for value in values))
        if transform == "create_graph":
            leaves = [value.requires_grad_() for value in values]
            first = torch.autograd.grad(loss(*leaves).sum(), leaves, create_graph=True)
            return torch.autograd.grad(sum(each.square().sum() for each in first), leaves)
        if transform == "grad":
            return torch.func.grad(lambda *leaves: loss(*leaves).sum(), places)(*values)
        hessian = torch.func.hessian(lambda *leaves: loss(*leaves).sum(), (0, 1))(*values)
        return [block for row in hessian for block in row]

    kinds.assert_close(transformed(fused), transformed(dense))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("positions", [(), (2,)])
def test_vmap_over_weights(device, positions, reduction):
    call = make_call(positions, device=device, ignored=-100)
    x, w, target = call["input"], call["linear_weight"], call["target"]
    weights = torch.randn(3, *target.shape, dtype=torch.float64, device=device)

    def loss(x, row_weight):
        return lowtide.linear_cross_entropy(x, w, target, row_weight=row_weight, reduction=reduction).sum()

    found = torch.vmap(torch.func.grad_and_value(loss), (None, 0))(x, weights)
    for k, row_weight in enumerate(weights):
        leaf = x.detach().requires_grad_()
        value = loss(leaf, row_weight)
        (gradient,) = torch.autograd.grad(value, leaf)
        kinds.assert_close([each[k] for each in found], [gradient, value])


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_checkpointing(device, reduction):
    inputs, options = weighted(device=device, kind="all, classes")
    expected = differentiate(fused, inputs, 0.3, reduction=reduction, **options)
    names = list(inputs.leaves())

    def loss(row_weight, *leaves):
        changed = replace(inputs, row_weight=row_weight * 1, **dict(zip(names, leaves)))
        return fused(changed, reduction=reduction, **options)

    leaves = inputs.leaves().values()
    value = checkpoint(loss, inputs.row_weight, *leaves, use_reentrant=False)
    found = torch.autograd.grad(value, list(leaves), torch.full_like(value, 0.3))
    for name, each in zip(names, found):
        assert torch.equal(each, expected[name]), name


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", ["plain", *ALL])
def test_retained_graph_exact(device, kind, reduction):
    inputs, options = weighted(device=device, dtype=torch.bfloat16, kind=kind)
    loss, leaves = fused(inputs, reduction=reduction, **options), inputs.leaves()
    for last, upstream in ((False, 0.3), (False, -2.0), (True, 0.3)):
        seed = torch.full_like(loss, upstream)
        found = torch.autograd.grad(loss, tuple(leaves.values()), seed, retain_graph=not last)
        check(
            {"loss": loss.detach(), **dict(zip(leaves, found))},
            inputs,
            upstream=upstream,
            reduction=reduction,
            **options,
        )


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("probabilities", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_opcheck(device, reduction, probabilities, positions):
    if positions and reduction == "none":
        pytest.skip("each position is a call of its own")
    call = make_call((3,) if positions else (), device=device, probabilities=probabilities)
    target = call["target"]
    row_weight = torch.randn(6, *(3,) * positions, dtype=torch.float64, device=device)
    head = [[call["input"]], [call["linear_weight"]], None, None, target, None, row_weight, None]
    options = Options(reduction=reduction, z_loss=0.1, compute_dtype=torch.float64)
    wanted = (True, True, False, False)
    arguments = with_new_graph_facts("lowtide::linear_cross_entropy", (*head, wanted, *options))
    torch.library.opcheck(OPERATORS.linear_cross_entropy.default, arguments)
    if reduction == "none":
        loss_N, *statistics = OPERATORS.linear_cross_entropy(*arguments)
        backward = OPERATORS.linear_cross_entropy_backward.default
        torch.library.opcheck(backward, (torch.randn_like(loss_N), statistics, *arguments))


class Model(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.body = torch.nn.Linear(8, 8)
        self.criterion = lowtide.LinearCrossEntropyLoss(8, 21, bias=True, z_loss=0.1, **options)

    def forward(self, hidden, target, row_weight):
        return self.criterion(self.body(hidden).tanh(), target, row_weight=row_weight)


def batch(rows, device, positions):
    shape = (rows, *positions)
    return (
        torch.randn(rows, 8, device=device),
        torch.randint(21, shape, device=device),
        torch.randn(shape, device=device),
    )


def gradients(module, arguments):
    loss = module(*arguments)
    return torch.autograd.grad(loss, list(module.parameters()), torch.full_like(loss, 0.3))


@pytest.fixture
def traced(monkeypatch):
    """Restore torch.empty for the compiler and the exporter, which would trace conftest.py's."""
    monkeypatch.undo()
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("positions", [(), (2,)])
@pytest.mark.parametrize("reduction", all_extended_but(["mean"], REDUCTIONS))
def test_compile(device, reduction, positions, traced):
    model = Model(reduction=reduction, out_features=positions).to(device)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for rows in (9, 14):
        arguments = batch(rows, device, positions)
        for found, expected in zip(gradients(compiled, arguments), gradients(model, arguments)):
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("positions", [(), (2,)])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_export(device, reduction, positions, traced):
    model = Model(reduction=reduction, out_features=positions).to(device)
    rows = {0: torch.export.Dim("rows", min=2)}
    program = torch.export.export(model, batch(9, device, positions), dynamic_shapes=(rows, rows, rows))
    for length in (9, 14):
        arguments = batch(length, device, positions)
        for found, expected in zip(gradients(program.module(), arguments), gradients(model, arguments)):
            assert torch.equal(found, expected)


# Errors.

x, w, t = torch.randn(4, 3), torch.randn(7, 3), torch.tensor([0, 1, -100, 6])
w_K, t_K, r = torch.randn(7, 2, 3), torch.zeros(4, 2).long(), torch.ones(4)
BAD = [
    ("a list", {"row_weight": [1.0] * 4}, TypeError, "row_weight must be a torch.Tensor, got list"),
    ("integers", {"row_weight": t}, TypeError,
     "row_weight must be a floating-point tensor, got torch.int64; use row_weight.float()"),
    ("complex", {"row_weight": r + 0j}, TypeError, "row_weight must be a floating-point tensor"),
    ("sparse", {"row_weight": r.to_sparse()}, TypeError, "row_weight must be a dense tensor"),
    ("too short", {"row_weight": r[:3]}, ValueError,
     "row_weight must have shape [4], one number a row, got [3]; slice it like input and target"),
    ("one number", {"row_weight": r[0]}, ValueError, "row_weight must have shape [4]", "row_weight.expand"),
    ("a column", {"row_weight": r[:, None]}, ValueError, "row_weight must have shape [4]", "got [4, 1]"),
    ("on meta", {"row_weight": r.to("meta")}, ValueError, "row_weight must be on input's device (cpu)"),
    ("with a gradient", {"row_weight": r.clone().requires_grad_()}, ValueError, "pass row_weight.detach()"),
    ("K: flat", {"linear_weight": w_K, "target": t_K, "row_weight": r}, ValueError,
     "row_weight must have shape [4, 2], one number a row, got [4]"),
    ("K: with a gradient", {"linear_weight": w_K, "target": t_K, "row_weight": r[:, None].expand(4, 2)
     .clone().requires_grad_()}, ValueError, "pass row_weight.detach()"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "error", "parts"), [pytest.param(a, e, m, id=i) for i, a, e, *m in BAD]
)
def test_errors(arguments, error, parts):
    with pytest.raises(error, match=re.escape(parts[0])) as caught:
        lowtide.linear_cross_entropy(**{"input": x, "linear_weight": w, "target": t} | arguments)
    assert all(part in str(caught.value) for part in parts)


def test_no_grad_weight_requires_gradient():
    row_weight = r.clone().requires_grad_()
    with torch.no_grad():
        assert lowtide.linear_cross_entropy(x, w, t, row_weight=row_weight).isfinite()


def test_meta():
    call = [each.to("meta") for each in (x, w, t)]
    found = lowtide.linear_cross_entropy(*call, row_weight=r.to("meta"), reduction="none")
    assert found.is_meta
    assert found.shape == (4,)
