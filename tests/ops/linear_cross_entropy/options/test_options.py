"""Soft cap, logit scale, z-loss and class probabilities: alone, all combined, and at their ends."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from tests.ops.linear_cross_entropy import kinds
from tests.support.loss import (
    HALVES,
    check,
    dense,
    differentiate,
    fused,
    make_inputs,
    norm,
    skip_unless_runnable,
    smallest_workspace,
)

# Triton's interpreter computes with numpy, which warns of inf - inf.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

REDUCTIONS = ("mean", "sum", "none")
DTYPES = (torch.float32, torch.float64, *HALVES)

# The arguments of make_inputs, and the options of the call.
KINDS = {
    "softcap": ({}, {"softcap": 1.5}),
    "scale": ({}, {"logit_scale": 0.6}),
    "learned scale": ({"logit_scale": True}, {}),
    "z-loss": ({}, {"z_loss": 0.3}),
    "probabilities": ({"probabilities": True}, {}),
    "smoothed probabilities": ({"probabilities": True, "class_weight": True}, {"label_smoothing": 0.1}),
    "weighted z-loss": ({"class_weight": True}, {"z_loss": 0.3, "label_smoothing": 0.1}),
    **{name: kinds.KINDS[name] for name in ("all, classes", "all, probabilities")},
}


def check_fused(inputs, upstream=1.0, **options):
    check(differentiate(fused, inputs, upstream, **options), inputs, upstream=upstream, **options)


def workspace_of(size, inputs, **options):
    """ "few": a few rows at a time."""
    if size == "default":
        return None
    return 2 * smallest_workspace(lambda workspace: fused(inputs, workspace=workspace, **options))


@pytest.mark.parametrize("workspace", ["default", "few"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_each_option(device, kind, reduction, dtype, workspace):
    made, options = KINDS[kind]
    inputs = make_inputs(device=device, dtype=dtype, **made)
    upstream = torch.randn(inputs.leading, device=device) if reduction == "none" else -0.7
    for backend in ("auto", "torch") if device == "cuda" else ("torch",):
        chosen = options | {"reduction": reduction, "backend": backend}
        check_fused(inputs, upstream, workspace=workspace_of(workspace, inputs, **chosen), **chosen)


@pytest.mark.parametrize("workspace", ["default", "few"])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_each_option_triton(device, kind, reduction, dtype, workspace):
    skip_unless_runnable("triton", device)
    if device == "cpu" and (workspace == "few" or dtype != torch.float32) and not kind.startswith("all"):
        pytest.skip("slow in the interpreter")
    made, options = KINDS[kind]
    inputs = make_inputs(5, 3, 21, device=device, dtype=dtype, **made)
    chosen = options | {"reduction": reduction, "backend": "triton"}
    check_fused(inputs, workspace=workspace_of(workspace, inputs, **chosen), **chosen)


@pytest.mark.parametrize("probabilities", [False, True])
@pytest.mark.parametrize("class_weight", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_every_combination(device, reduction, class_weight, probabilities):
    for bias, smoothing, softcap, z_loss, scale in itertools.product(
        (False, True), (0.0, 0.2), (None, 2.0), (0.0, 0.1), (None, -0.8, "learned")
    ):
        inputs = make_inputs(
            11,
            5,
            13,
            device=device,
            dtype=torch.float64,
            bias=bias,
            class_weight=class_weight,
            probabilities=probabilities,
            logit_scale=scale == "learned",
        )
        options = {"label_smoothing": smoothing, "softcap": softcap, "z_loss": z_loss}
        options |= {"reduction": reduction, "logit_scale": None if scale == "learned" else scale}
        check_fused(inputs, 0.3, workspace=workspace_of("few", inputs, **options), **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_reference(device, reduction, kind):
    made, options = KINDS[kind]
    inputs = make_inputs(device=device, dtype=torch.float64, **made)
    check_fused(inputs, reduction=reduction, backend="reference", **options)


# Autograd, where the options add something to what test_autograd.py checks.


@pytest.mark.parametrize("kind", ["all, classes", "all, probabilities"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", ["input", "linear_weight", "linear_bias", "logit_scale"])
def test_gradient_of_one_operand(device, name, reduction, kind):
    made, options = KINDS[kind]
    inputs = make_inputs(device=device, **made)
    frozen = {other: leaf.detach() for other, leaf in inputs.leaves().items() if other != name}
    check_fused(replace(inputs, **frozen), 0.3, reduction=reduction, **options)


@pytest.mark.parametrize("kind", ["all, classes", "all, probabilities"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_retained_graph_exact(device, dtype, reduction, kind):
    made, options = KINDS[kind]
    inputs = make_inputs(device=device, dtype=dtype, **made)
    options = options | {"reduction": reduction}
    loss, leaves = fused(inputs, **options), inputs.leaves()
    for last, upstream in ((False, 0.3), (False, -2.0), (True, 0.3)):
        seed = torch.full_like(loss, upstream)
        found = torch.autograd.grad(loss, tuple(leaves.values()), seed, retain_graph=not last)
        check({"loss": loss.detach(), **dict(zip(leaves, found))}, inputs, upstream=upstream, **options)


@pytest.mark.parametrize("kind", ["all, classes", "all, probabilities"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_call_same_bits(device, dtype, reduction, kind):
    made, options = KINDS[kind]
    inputs = make_inputs(device=device, dtype=dtype, **made)
    first = differentiate(fused, inputs, 0.3, reduction=reduction, **options)
    again = differentiate(fused, inputs, 0.3, reduction=reduction, **options)
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name]), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_no_grad_same_loss(device, reduction, kind):
    made, options = KINDS[kind]
    inputs = make_inputs(device=device, **made)
    expected = fused(inputs, reduction=reduction, **options).detach()
    with torch.no_grad():
        loss = fused(inputs, reduction=reduction, **options)
    assert not loss.requires_grad
    assert norm(loss - expected) <= torch.finfo(torch.float32).eps * norm(expected)


# Rows and classes that count, and those that do not.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("rows", [0, 9])
def test_no_valid_rows(device, rows, reduction, dtype):
    """Nor does the z-loss of an ignored row."""
    inputs = make_inputs(rows, device=device, dtype=dtype, bias=True, logit_scale=True, ignored=1.0)
    result = differentiate(fused, inputs, reduction=reduction, z_loss=0.1, softcap=3.0)
    loss = result.pop("loss")
    if reduction == "none":
        assert torch.equal(loss, loss.new_zeros(rows))
    else:
        assert loss.item() == 0 if reduction == "sum" else math.isnan(loss.item())
    for name, gradient in result.items():
        assert torch.equal(gradient, torch.zeros_like(getattr(inputs, name))), name


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_probabilities_no_rows(device, reduction):
    inputs = make_inputs(0, device=device, bias=True, probabilities=True)
    check_fused(inputs, reduction=reduction)


@pytest.mark.parametrize("sizes", [(37, 19, 1), (1, 19, 63), (1, 1, 1), (None, 1, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["all, classes", "all, probabilities", "z-loss"])
def test_odd_sizes(device, kind, dtype, sizes):
    made, options = KINDS[kind]
    inputs = make_inputs(*sizes, device=device, dtype=dtype, ignored=0.0, **made)
    for reduction in REDUCTIONS:
        check_fused(inputs, reduction=reduction, **options)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", ["all, classes", "all, probabilities"])
def test_leading_dimensions(device, kind, reduction):
    made, options = KINDS[kind]
    for leading in ((), (1,), (2, 3), (2, 1, 3), (2, 0)):
        N = math.prod(leading)
        inputs = make_inputs(N, 5, 7, device=device, ignored=0.0, **made)
        shape = (*leading, 7) if inputs.probabilities else leading
        x = inputs.input.detach().view(*leading, 5).requires_grad_()
        check_fused(
            replace(inputs, input=x, target=inputs.target.view(shape)), reduction=reduction, **options
        )


# Soft cap.


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("softcap", "scale"), [(30.0, 1e4), (1e-3, 2.0), (30.0, 50.0), (1e6, 2.0)])
def test_soft_cap_any_size(device, softcap, scale, dtype, backend):
    """Logits far above it, at it, and far below. Far above, one in a hundred has a gradient."""
    skip_unless_runnable(backend, device)
    inputs = make_inputs(64, 8, 101, device=device, dtype=dtype, scale=scale)
    check_fused(inputs, softcap=softcap, backend=backend)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_soft_cap_of_masked_class(device, backend):
    """c tanh(-inf) is -c: a finite logit."""
    skip_unless_runnable(backend, device)
    inputs = make_inputs(7, 5, 11, device=device, bias=True)
    bias = inputs.linear_bias.detach().clone()
    bias[3] = -torch.inf
    check_fused(replace(inputs, linear_bias=bias.requires_grad_()), softcap=4.0, backend=backend)


def test_soft_cap_and_temperature(device):
    """The docstring: c tanh(z / c) / T is a scale of 1 / T and a cap of c / T."""
    T, c = 0.7, 3.0
    inputs = make_inputs(device=device, dtype=torch.float64)
    logits_NV = c * torch.tanh(inputs.input @ inputs.linear_weight.t() / c) / T
    expected = torch.nn.functional.cross_entropy(logits_NV, inputs.target)
    torch.testing.assert_close(fused(inputs, logit_scale=1 / T, softcap=c / T), expected, rtol=1e-12, atol=0)


# Logit scale.


@pytest.mark.parametrize("value", [0, 0.0, 1, 1.0, -3, 1e-6, 1e3])
@pytest.mark.parametrize("learned", [False, True])
def test_scale_any_size(device, learned, value):
    inputs = make_inputs(device=device)
    if learned:
        scale = torch.tensor(float(value), device=device, requires_grad=True)
        check_fused(replace(inputs, logit_scale=scale))
    else:
        check_fused(inputs, logit_scale=value)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_scale_of_other_dtype(device, scale_dtype, dtype, reduction):
    """Its gradient has its dtype."""
    inputs = make_inputs(device=device, dtype=dtype)
    scale = torch.tensor(0.7, dtype=scale_dtype, device=device, requires_grad=True)
    check_fused(replace(inputs, logit_scale=scale), 0.3, reduction=reduction)


def test_scale_tensor_matches_number(device):
    inputs = make_inputs(device=device)
    scale = torch.tensor(0.7, device=device)
    by_number = differentiate(fused, inputs, logit_scale=0.7)
    by_tensor = differentiate(fused, inputs, logit_scale=scale)
    for name, tensor in by_number.items():
        torch.testing.assert_close(by_tensor[name], tensor, rtol=1e-6, atol=1e-7)


# Class probabilities.


def test_z_loss_definition(device):
    inputs = make_inputs(device=device, dtype=torch.float64, class_weight=True, ignored=0.0)
    logsumexp = (inputs.input @ inputs.linear_weight.t()).logsumexp(1)
    plain, penalised = (fused(inputs, reduction="none", z_loss=z) for z in (0.0, 0.3))
    torch.testing.assert_close(penalised - plain, 0.3 * logsumexp**2, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("z_loss", [1e-4, 1, 100.0])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_z_loss_any_size(device, dtype, z_loss):
    check_fused(make_inputs(device=device, dtype=dtype, scale=20.0), z_loss=z_loss)


def test_z_loss_one_class(device):
    inputs = make_inputs(9, 5, 1, device=device, dtype=torch.float64, ignored=0.0)
    loss = fused(inputs, z_loss=0.3)
    expected = 0.3 * (inputs.input @ inputs.linear_weight.t()).square().mean()
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(loss, dense(inputs, z_loss=0.3), rtol=1e-13, atol=0)
