"""A head of several linear terms, x_0 W_0^T + x_1 W_1^T + ...: as one term of all features.

Shapes: N tokens, D_k features of term k, V classes, R the rank of an adapter.
"""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from lowtide.ops.linear_cross_entropy.dispatch import cross_entropy, log_probs
from tests.support.loss import (
    HALVES,
    check,
    check_log_probs,
    differentiate,
    differentiate_log_probs,
    make_inputs,
    norm,
    skip_unless_runnable,
    smallest_workspace,
)

REDUCTIONS = ("mean", "sum", "none")
WIDTHS = [(19,), (8, 11), (16, 1, 2)]
OPTIONS = {"softcap": 1.5, "z_loss": 0.1, "label_smoothing": 0.1}


def in_terms(function, widths):
    """The function of Inputs whose features are cut into terms of these widths."""

    def called(inputs, **options):
        if inputs.logit_scale is not None:
            options["logit_scale"] = inputs.logit_scale
        if inputs.weight is not None:
            options["weight"] = inputs.weight
        if inputs.row_weight is not None:
            options["row_weight"] = inputs.row_weight
        return function(
            inputs.input.split(widths, -1),
            inputs.linear_weight.split(widths, -1),
            inputs.target,
            linear_bias=inputs.linear_bias,
            **options,
        )

    return called


@pytest.mark.parametrize("workspace", ["default", "few"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALVES])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("widths", WIDTHS)
def test_terms_match_concatenation(device, widths, reduction, dtype, workspace):
    loss_of = in_terms(cross_entropy, widths)
    for options in ({}, OPTIONS):
        inputs = make_inputs(device=device, dtype=dtype, bias=bool(options), class_weight=bool(options))
        chosen = options | {"reduction": reduction}
        if workspace == "few":
            chosen["workspace"] = 2 * smallest_workspace(
                lambda size, chosen=chosen, inputs=inputs: loss_of(inputs, **chosen | {"workspace": size})
            )
        check(differentiate(loss_of, inputs, -0.7, **chosen), inputs, upstream=-0.7, **chosen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_triton(device, reduction, dtype):
    skip_unless_runnable("triton", device)
    inputs = make_inputs(5, 6, 21, device=device, dtype=dtype, bias=True)
    options = OPTIONS | {"reduction": reduction, "backend": "triton"}
    check(differentiate(in_terms(cross_entropy, (4, 2)), inputs, **options), inputs, **options)


@pytest.mark.parametrize("probabilities", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_all_options(device, reduction, probabilities):
    inputs = make_inputs(
        device=device, bias=True, class_weight=True, logit_scale=True, probabilities=probabilities
    )
    options = OPTIONS | {"reduction": reduction}
    check(differentiate(in_terms(cross_entropy, (8, 11)), inputs, **options), inputs, **options)
    check(
        differentiate(in_terms(cross_entropy, (8, 11)), inputs, backend="reference", **options),
        inputs,
        **options,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("widths", WIDTHS)
def test_log_probs(device, widths, dtype):
    inputs = make_inputs(device=device, dtype=dtype, bias=True, logit_scale=True)
    upstream = [torch.randn(inputs.leading, device=device) for _ in range(3)]
    result = differentiate_log_probs(in_terms(log_probs, widths), inputs, upstream, softcap=1.5)
    check_log_probs(result, inputs, upstream, softcap=1.5)


@pytest.mark.parametrize("frozen", ["input", "linear_weight"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_frozen_operand(device, reduction, frozen):
    inputs = make_inputs(device=device, bias=True)
    inputs = replace(inputs, **{frozen: getattr(inputs, frozen).detach()})
    check(
        differentiate(in_terms(cross_entropy, (8, 11)), inputs, reduction=reduction),
        inputs,
        reduction=reduction,
    )


@pytest.mark.parametrize("trained", [(True, False), (False, True)])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_frozen_term(device, reduction, trained):
    """The gradients of the other are those that it has when nothing is frozen."""
    inputs = make_inputs(device=device)

    def gradients(trained):
        x = [part.detach().requires_grad_(own) for part, own in zip(inputs.input.split((8, 11), -1), trained)]
        w = [
            part.detach().requires_grad_(own)
            for part, own in zip(inputs.linear_weight.split((8, 11), -1), trained)
        ]
        loss = cross_entropy(x, w, inputs.target, reduction=reduction).sum()
        return torch.autograd.grad(loss, [leaf for leaf in (*x, *w) if leaf.requires_grad])

    everything, own = gradients((True, True)), gradients(trained)
    for ours, theirs in zip(own, everything[trained.index(True) :: 2]):
        assert norm(ours - theirs) <= 4 * torch.finfo(torch.float32).eps * norm(theirs)


# LoRA: x W^T + s (x A^T) B^T.


def lora_leaves(device, dtype, frozen_weight):
    N, D, R, V = 23, 16, 3, 41
    x, w, a, b = (
        (torch.randn(shape) * scale).to(device, dtype)
        for shape, scale in (((N, D), 1.0), ((V, D), 0.5), ((R, D), 0.3), ((V, R), 0.5))
    )
    for leaf in (x, a, b) if frozen_weight else (x, w, a, b):
        leaf.requires_grad_()
    target = torch.randint(V, (N,), device=device)
    target[::4] = -100
    return x, w, a, b, target


def lora_dense(x, w, a, b, target, **options):
    sum_dtype = torch.promote_types(x.dtype, torch.float32)
    logits_NV = F.linear(x.to(sum_dtype), w.to(sum_dtype))
    adapted_NR = 2.0 * F.linear(x, a)
    logits_NV = logits_NV + F.linear(adapted_NR.to(sum_dtype), b.to(sum_dtype))
    return F.cross_entropy(logits_NV, target, **options)


def lora_fused(x, w, a, b, target, **options):
    return cross_entropy((x, 2.0 * F.linear(x, a)), (w, b), target, **options)


@pytest.mark.parametrize("frozen_weight", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_lora(device, reduction, dtype, frozen_weight):
    """Exact in every leaf, x through both terms; no error beyond eager's."""
    *leaves, target = lora_leaves(device, dtype, frozen_weight)
    exact_leaves = [leaf.detach().double().requires_grad_(leaf.requires_grad) for leaf in leaves]

    def result(loss_of, leaves):
        loss = loss_of(*leaves, target, reduction=reduction)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        return loss.detach(), *torch.autograd.grad(loss.sum(), wanted)

    exact = result(lora_dense, exact_leaves)
    eager = result(lora_dense, leaves)
    ours = result(lora_fused, leaves)
    assert len(ours) == (4 if frozen_weight else 5)
    for found, theirs, want in zip(ours, eager, exact):
        assert found.dtype == dtype
        rounding = 8 * torch.finfo(dtype).eps * norm(want)
        assert norm(found.double() - want) <= 2 * norm(theirs.double() - want) + rounding


def test_adapter_of_zeros(device):
    """B = 0, as LoRA starts: the loss of the bare head, and a gradient for B that is not zero."""
    x, w, a, b, target = lora_leaves(device, torch.float64, frozen_weight=True)
    b = torch.zeros_like(b).requires_grad_()
    loss = lora_fused(x, w, a, b, target)
    torch.testing.assert_close(loss, F.cross_entropy(x @ w.t(), target), rtol=1e-13, atol=0)
    grad_a, grad_b = torch.autograd.grad(loss, (a, b))
    assert grad_a.eq(0).all()
    assert grad_b.ne(0).any()


# Arguments that do not fit.


@pytest.mark.parametrize(
    ("inputs", "weights", "message"),
    [
        (((4, 3), (5, 2)), ((7, 3), (7, 2)), r"inputs\[1\] must have shape \[4, D\], got \[5, 2\]"),
        (((4, 3), (4, 2)), ((7, 3), (6, 2)), r"linear_weights\[1\] must have 7 rows, got \[6, 2\]"),
        (((4, 3), (4, 2)), ((7, 3), (7, 3)), r"linear_weights\[1\] must have shape \[V, 2\]"),
        (((4, 3), (4, 2)), ((7, 3),), "linear_weights"),
        (((4, 3),), ((7, 3), (7, 2)), "linear_weights"),
    ],
)
def test_terms_of_mismatched_shapes(inputs, weights, message):
    with pytest.raises(ValueError, match=message):
        cross_entropy(
            [torch.randn(shape) for shape in inputs],
            [torch.randn(shape) for shape in weights],
            torch.zeros(4).long(),
        )


def test_terms_of_other_dtypes():
    x, w = torch.randn(4, 3), torch.randn(7, 3)
    with pytest.raises(TypeError, match=r"inputs\[1\] must have the dtype of input"):
        cross_entropy((x, x.double()), (w, w), torch.zeros(4).long())
    with pytest.raises(TypeError, match=r"linear_weights\[1\] must have the dtype of input"):
        cross_entropy((x, x), (w, w.bfloat16()), torch.zeros(4).long())
