"""The loss and every gradient against float64, for all options, workspaces, dtypes, backends."""

import itertools
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.loss import (
    HALVES,
    check,
    differentiate,
    fused,
    make_inputs,
    rows_for,
    skip_unless_runnable,
    smallest_workspace,
    workspace_for,
)

REDUCTIONS = ("mean", "sum", "none")
DTYPES = (torch.float32, torch.float64, *HALVES)


def workspace_of(kind, inputs, **options):
    """ "tight": two chunks, the weight gradient summed over them; one for few tokens in half
    precision, whose gradient is rounded from it. "least": a row or so at a time, and a
    half-precision weight's gradient class block by class block. "few": a few rows at a time."""
    if kind == "default":
        return None
    if kind in ("least", "few"):
        least = smallest_workspace(lambda workspace: fused(inputs, workspace=workspace, **options))
        return least if kind == "least" else 2 * least
    chunk = -(-inputs.target.numel() // 2)
    ways = ("accumulate", "single_product")
    return workspace_for(inputs, lambda plan: plan.rows >= chunk and plan.weight_gradient in ways)


def check_fused(inputs, upstream=1.0, **options):
    check(differentiate(fused, inputs, upstream, **options), inputs, upstream=upstream, **options)


@pytest.mark.parametrize("kind", ["default", "tight", "least"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("class_weight", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_every_combination(device, reduction, bias, class_weight, smoothing, dtype, kind):
    for ignore_index, upstream in ((None, 1.0), (3, -0.7)):
        inputs = make_inputs(
            device=device,
            dtype=dtype,
            bias=bias,
            class_weight=class_weight,
            ignore_index=-100 if ignore_index is None else ignore_index,
        )
        options = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": ignore_index}
        for backend in ("auto", "torch") if device == "cuda" else ("auto",):
            workspace = workspace_of(kind, inputs, backend=backend)
            check_fused(inputs, upstream, workspace=workspace, backend=backend, **options)


@pytest.mark.parametrize("kind", ["default", "least"])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("options", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_triton(device, reduction, options, dtype, kind):
    skip_unless_runnable("triton", device)
    N = rows_for(device, dtype, 7)
    inputs = make_inputs(N, 5, 21, device=device, dtype=dtype, bias=options, class_weight=options)
    chosen = {"backend": "triton", "reduction": reduction, "label_smoothing": 0.1 * options}
    check_fused(inputs, workspace=workspace_of(kind, inputs, backend="triton"), **chosen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["default", "tight", "few"])
@pytest.mark.parametrize(
    "sizes", [(63, 123, 507), (507, 63, 123), (1, 19, 63), (37, 19, 1), (1, 1, 1), (None, 1, 2)]
)
def test_odd_sizes(device, sizes, kind, dtype):
    inputs = make_inputs(*sizes, device=device, dtype=dtype, bias=True, ignored=0.1)
    for reduction in REDUCTIONS:
        check_fused(inputs, reduction=reduction, workspace=workspace_of(kind, inputs))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("rows", [0, 9])
def test_no_valid_rows(device, rows, reduction, dtype):
    """No rows at all, or all of them ignored: the mean is 0 / 0, every gradient is zero."""
    inputs = make_inputs(rows, device=device, dtype=dtype, bias=True, class_weight=True, ignored=1.0)
    result = differentiate(fused, inputs, reduction=reduction, label_smoothing=0.1)
    loss = result.pop("loss")
    if reduction == "none":
        assert torch.equal(loss, loss.new_zeros(rows))
    else:
        assert loss.item() == 0 if reduction == "sum" else math.isnan(loss.item())
    for name, gradient in result.items():
        leaf = getattr(inputs, name)
        assert gradient.dtype == leaf.dtype
        assert torch.equal(gradient, torch.zeros_like(leaf)), name


@pytest.mark.parametrize("ignore_index", [-1, 0, 5, 62, 63, 10_000, -(2**40)])
@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
def test_ignore_index_any_value(device, ignore_index, integer):
    if integer == torch.int32 and abs(ignore_index) >= 2**31:
        pytest.skip("no int32")
    inputs = make_inputs(device=device, ignore_index=ignore_index, class_weight=True)
    inputs = type(inputs)(**{**vars(inputs), "target": inputs.target.to(integer)})
    assert (inputs.target == ignore_index).any()
    for smoothing in (0.0, 0.3):
        check_fused(inputs, ignore_index=ignore_index, label_smoothing=smoothing)


@pytest.mark.parametrize("smoothing", [0, 1e-6, 1, 1.0])
@pytest.mark.parametrize("class_weight", [False, True])
def test_label_smoothing_0_and_1(device, smoothing, class_weight):
    check_fused(make_inputs(device=device, class_weight=class_weight), label_smoothing=smoothing)


def test_class_weight_of_other_dtype(device):
    inputs = make_inputs(device=device, dtype=torch.bfloat16, class_weight=True)
    inputs = type(inputs)(**{**vars(inputs), "weight": inputs.weight.float() / 3})
    check_fused(inputs, label_smoothing=0.1)


def test_class_weight_of_zero(device):
    inputs = make_inputs(device=device, class_weight=True)
    inputs.weight[inputs.target[inputs.target >= 0][0]] = 0
    for reduction, smoothing in itertools.product(REDUCTIONS, (0.0, 0.1)):
        check_fused(inputs, reduction=reduction, label_smoothing=smoothing)


@pytest.mark.parametrize("kind", ["default", "least"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    sizes=st.tuples(st.integers(0, 80), st.integers(1, 20), st.integers(1, 70)),
    bias=st.booleans(),
    class_weight=st.booleans(),
    smoothing=st.sampled_from([0.0, 0.05, 0.9]),
    ignored=st.sampled_from([0.0, 0.5]),
    room=st.integers(0, 100_000),
    upstream=st.sampled_from([1.0, -0.5, 2.0**-20, 2.0**13]),  # for others: test_loss_scaled
)
def test_any_call(
    device, reduction, dtype, kind, sizes, bias, class_weight, smoothing, ignored, room, upstream
):
    inputs = make_inputs(
        *sizes, device=device, dtype=dtype, bias=bias, class_weight=class_weight, ignored=ignored
    )
    workspace = workspace_of(kind, inputs)
    if workspace is not None:
        workspace += room
    check_fused(inputs, upstream, reduction=reduction, label_smoothing=smoothing, workspace=workspace)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_features(device, dtype):
    inputs = make_inputs(9, 1, 5, device=device, dtype=dtype, ignored=0)
    empty = {
        name: getattr(inputs, name).detach()[:, :0].requires_grad_() for name in ("input", "linear_weight")
    }
    result = differentiate(fused, type(inputs)(**{**vars(inputs), **empty}))
    assert result["loss"].item() == pytest.approx(math.log(5), rel=1e-6)
    assert result["input"].shape == (9, 0)
    assert result["linear_weight"].shape == (5, 0)
