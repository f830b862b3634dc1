"""Results against float64: divergences, dtypes, sizes, chunks, masks, layouts, extremes."""

import math
from dataclasses import replace

import pytest
import torch

from lowtide.ops.distillation import forward_kl, jensen_shannon, reverse_kl
from tests.ops.distillation.helpers import (
    DIVERGENCES,
    HALVES,
    REDUCTIONS,
    check,
    dense,
    differentiate,
    fused,
    make_inputs,
)
from tests.support.loss import norm, smallest_workspace

DTYPES = (torch.float32, torch.float64, *HALVES)


def check_fused(inputs, divergence, upstream=1.0, **options):
    check(
        differentiate(fused, inputs, divergence, upstream, **options), inputs, divergence, upstream, **options
    )


def least_workspace(inputs, divergence, **options):
    return smallest_workspace(lambda workspace: fused(inputs, divergence, workspace=workspace, **options))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("bias", [False, True])
def test_values(device, dtype, divergence, reduction, temperature, bias):
    inputs = make_inputs(device=device, dtype=dtype, bias=bias)
    upstream = torch.randn(inputs.leading).to(device) if reduction == "none" else 0.3
    check_fused(inputs, divergence, upstream, reduction=reduction, temperature=temperature)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize(
    "shape", [(1, 5, 7, 3), (5, 3, 1, 2), (1, 1, 1, 1), (63, 17, 507, 33), (123, 8, 2, 8)]
)
@pytest.mark.parametrize("room", [1, 2, 5])
def test_sizes_and_chunks(device, dtype, divergence, shape, room):
    inputs = make_inputs(*shape, device=device, dtype=dtype, bias=True, ignored=0)
    check_fused(inputs, divergence, workspace=room * least_workspace(inputs, divergence))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("caps", [(3.0, 5.0), (3.0, None), (None, 2.0)])
def test_soft_caps(device, dtype, divergence, reduction, caps):
    """Logits of standard deviation 3 and more: the caps bend many of them."""
    inputs = make_inputs(device=device, dtype=dtype, bias=True, scale=3)
    upstream = torch.randn(inputs.leading).to(device) if reduction == "none" else 0.3
    options = {"reduction": reduction, "temperature": 1.7}
    options |= {"student_softcap": caps[0], "teacher_softcap": caps[1]}
    check_fused(inputs, divergence, upstream, **options)
    least = least_workspace(inputs, divergence, **options)
    check_fused(inputs, divergence, upstream, workspace=2 * least, **options)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_soft_caps_large_logits(device, divergence):
    """Logits that a cap holds do not move; one far above them all changes nothing."""
    held = make_inputs(device=device, dtype=torch.float64, scale=1e6)
    result = differentiate(fused, held, divergence, student_softcap=3.0, teacher_softcap=3.0)
    assert 0 < result["loss"] < 6
    exact = differentiate(dense, held, divergence, student_softcap=3.0, teacher_softcap=3.0)
    for name, tensor in exact.items():
        torch.testing.assert_close(result[name], tensor)
    plain = make_inputs(device=device)
    wide = {"student_softcap": 1e4, "teacher_softcap": 1e4}
    torch.testing.assert_close(fused(plain, divergence, **wide), fused(plain, divergence))


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_soft_cap_teacher_equals_student(device, divergence):
    inputs = make_inputs(device=device, bias=True, scale=10)
    student = {name: tensor.detach() for name, tensor in inputs.leaves().items()}
    inputs = replace(inputs, **{name.replace("student", "teacher"): each for name, each in student.items()})
    result = differentiate(fused, inputs, divergence, student_softcap=30.0, teacher_softcap=30.0)
    for name, tensor in result.items():
        assert torch.equal(tensor, torch.zeros_like(tensor)), name


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_no_rows(device, divergence, reduction):
    inputs = make_inputs(0, device=device, bias=True, ignored=0)
    result = differentiate(fused, inputs, divergence, reduction=reduction)
    if reduction == "none":
        assert result["loss"].shape == (0,)
    else:
        torch.testing.assert_close(
            result["loss"].item(), math.nan if reduction == "mean" else 0.0, equal_nan=True
        )
    for name, leaf in inputs.leaves().items():
        assert torch.equal(result[name], torch.zeros_like(leaf))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_all_rows_ignored(device, divergence, reduction):
    inputs = make_inputs(device=device, bias=True)
    inputs = replace(inputs, ignored=torch.ones(37, dtype=torch.bool, device=device))
    result = differentiate(fused, inputs, divergence, reduction=reduction)
    assert (result["loss"].isnan() if reduction == "mean" else result["loss"] == 0).all()
    for name, leaf in inputs.leaves().items():
        assert torch.equal(result[name], torch.zeros_like(leaf))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_ignored_rows_hold_nan(device, divergence, reduction):
    inputs = make_inputs(device=device)
    expected = differentiate(fused, inputs, divergence, reduction=reduction)
    broken = {}
    for name in ("student_input", "teacher_input"):
        leaf = getattr(inputs, name)
        broken[name] = leaf.detach().masked_fill(inputs.ignored[:, None], torch.nan)
    broken["student_input"].requires_grad_()
    result = differentiate(fused, replace(inputs, **broken), divergence, reduction=reduction)
    for name, tensor in expected.items():
        assert torch.equal(result[name], tensor), name
    assert torch.equal(
        result["student_input"][inputs.ignored], torch.zeros_like(inputs.student_input[inputs.ignored])
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_layouts(device, dtype, reduction):
    """Shifted, strided and expanded tensors of several dimensions."""
    inputs = make_inputs(24, device=device, dtype=dtype)
    x = torch.randn(4, 7, 19).to(device, dtype)[:, :-1].requires_grad_()
    teacher_x = torch.randn(4, 1, 22).to(device, dtype)[..., ::2].expand(4, 6, 11)
    w = torch.randn(63, 38).div(4).to(device, dtype)[:, ::2].requires_grad_()
    teacher_w = torch.randn(11, 63).div(4).to(device, dtype).t()
    ignored = (torch.rand(6, 4) < 0.3).to(device).t()
    inputs = replace(
        inputs,
        student_input=x,
        teacher_input=teacher_x,
        student_weight=w,
        teacher_weight=teacher_w,
        ignored=ignored,
    )
    for workspace in (None, 2 * least_workspace(inputs, "forward")):
        check_fused(inputs, "forward", reduction=reduction, workspace=workspace)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_teacher_equals_student(device, divergence, dtype):
    """Exactly nothing: no difference of rounded numbers is left."""
    inputs = make_inputs(device=device, dtype=dtype, bias=True, scale=10)
    student = {name: tensor.detach() for name, tensor in inputs.leaves().items()}
    inputs = replace(inputs, **{name.replace("student", "teacher"): each for name, each in student.items()})
    result = differentiate(fused, inputs, divergence, reduction="none")
    for name, tensor in result.items():
        assert torch.equal(tensor, torch.zeros_like(tensor)), name


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("distance", [1e-2, 1e-3])
def test_loss_digits_near_teacher(device, divergence, distance):
    inputs = make_inputs(200, 19, 507, device=device, bias=True, scale=5, ignored=0)
    student = {name.replace("student", "teacher"): leaf.detach() for name, leaf in inputs.leaves().items()}
    student["teacher_bias"] = student["teacher_bias"] + distance * torch.randn(507, device=device)
    inputs = replace(inputs, **student)
    loss_N = fused(inputs, divergence, reduction="none").detach()
    exact_N = dense(inputs.to(torch.float64), divergence, reduction="none").detach()
    eager_N = dense(inputs, divergence, reduction="none").detach()
    assert (loss_N >= (0 if divergence.startswith("js") else -1e-7)).all()
    assert norm(loss_N - exact_N) <= 0.5 * norm(eager_N - exact_N)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("scale", [30.0, 300.0])
def test_large_logits(device, divergence, scale):
    inputs = make_inputs(device=device, bias=True, scale=scale)
    check_fused(inputs, divergence)
    double = inputs.to(torch.float64)
    check_fused(double, divergence)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_classes_excluded_by_both(device, divergence, reduction):
    """A padded vocabulary: as if those classes were not there."""
    inputs = make_inputs(device=device, dtype=torch.float64, bias=True)
    padded = replace(
        inputs,
        student_bias=inputs.student_bias.detach().index_fill(
            0, torch.tensor([3, 60], device=device), -torch.inf
        ),
        teacher_bias=inputs.teacher_bias.index_fill(0, torch.tensor([3, 60], device=device), -torch.inf),
    )
    kept = [v for v in range(63) if v not in (3, 60)]
    names = ("student_weight", "teacher_weight", "student_bias", "teacher_bias")
    cut = replace(padded, **{name: getattr(padded, name).detach()[kept] for name in names})
    cut.student_weight.requires_grad_()
    result = differentiate(fused, padded, divergence, reduction=reduction)
    expected = differentiate(fused, cut, divergence, reduction=reduction)
    assert torch.equal(result["student_weight"][[3, 60]], torch.zeros_like(inputs.student_weight[:2]))
    result["student_weight"] = result["student_weight"][kept]
    for name, tensor in expected.items():
        torch.testing.assert_close(result[name], tensor)


def test_classes_excluded_by_one(device):
    inputs = make_inputs(device=device, bias=True, ignored=0)
    without_3 = inputs.teacher_bias.index_fill(0, torch.tensor(3, device=device), -torch.inf)
    teacher = replace(inputs, teacher_bias=without_3)
    for divergence in ("forward", "js 0.5", "js 0.1"):
        result = differentiate(fused, teacher, divergence)
        assert all(tensor.isfinite().all() for tensor in result.values()), divergence
    assert fused(teacher, "reverse").isposinf()
    without_3 = inputs.student_bias.detach().index_fill(0, torch.tensor(3, device=device), -torch.inf)
    student = replace(inputs, student_bias=without_3)
    for divergence in ("reverse", "js 0.5", "js 0.1"):
        result = differentiate(fused, student, divergence)
        assert all(tensor.isfinite().all() for tensor in result.values()), divergence
    result = differentiate(fused, student, "forward")
    assert result.pop("loss").isposinf()
    assert all(tensor.isfinite().all() for tensor in result.values())


def test_jensen_shannon_limits(device):
    """To first order in beta, and in 1 - beta, as GKD says."""
    inputs = make_inputs(device=device, dtype=torch.float64, scale=1)
    heads = dict(inputs.items())
    for beta, limit in ((1e-7, forward_kl), (1 - 1e-7, reverse_kl)):
        divergence = jensen_shannon(**heads, beta=beta) / min(beta, 1 - beta)
        torch.testing.assert_close(divergence, limit(**heads), rtol=1e-5, atol=0)
    assert jensen_shannon(**dict(make_inputs(scale=1000).items())) <= math.log(2) * (1 + 1e-6)


def test_teacher_of_other_dtype(device):
    inputs = make_inputs(device=device)
    half = {name: tensor.bfloat16() for name, tensor in inputs.items() if name.startswith("teacher")}
    mixed = replace(inputs, **half)
    wide = replace(inputs, **{name: tensor.float() for name, tensor in half.items()})
    result, expected = (differentiate(fused, each, "forward") for each in (mixed, wide))
    for name, tensor in expected.items():
        torch.testing.assert_close(result[name], tensor, rtol=1e-5, atol=1e-6)


def test_temperature_factor_left_to_caller(device):
    inputs = make_inputs(device=device, dtype=torch.float64)
    torch.testing.assert_close(
        4**2 * fused(inputs, "forward", temperature=4), 16 * dense(inputs, "forward", temperature=4)
    )


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_float16_gradients_with_loss_scale(device, divergence):
    """With mean over many rows and a scale of 2^16, and for rows as small as 2^-20."""
    inputs = make_inputs(512, device=device, dtype=torch.float16, ignored=0)
    check_fused(inputs, divergence, upstream=2.0**16)
    check_fused(inputs, divergence, upstream=torch.full((512,), 2.0**-20), reduction="none")
