"""Tensors as models hand them over: shifted slices, transposes, expansions, any leading sizes."""

from dataclasses import replace

import pytest
import torch

from tests.support.loss import check, differentiate, fused, make_inputs, smallest_workspace

DTYPES = [torch.float32, torch.bfloat16]


def strided_like(shape, kind, device, dtype):
    """A leaf's view of `shape`, and that leaf: autograd's gradient must go through the view."""
    *leading, D = shape
    rows = leading[-1]
    make = {
        "shifted": lambda: (torch.randn(*leading[:-1], rows + 1, D), lambda t: t[..., :-1, :]),
        "transposed": lambda: (torch.randn(rows, *leading[:-1], D), lambda t: t.movedim(0, -2)),
        "features first": lambda: (torch.randn(*leading[:-1], D, rows), lambda t: t.transpose(-1, -2)),
        "every other column": lambda: (torch.randn(*leading, 2 * D), lambda t: t[..., ::2]),
        "expanded": lambda: (torch.randn(rows, D), lambda t: t.expand(*leading, D)),
        "one row expanded": lambda: (torch.randn(D), lambda t: t.expand(*leading, D)),
    }
    base, view = make[kind]()
    base = base.to(device, dtype)
    assert view(base).shape == shape
    return base, view


KINDS = ["shifted", "transposed", "features first", "every other column", "expanded", "one row expanded"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("workspace", ["default", "few rows"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("kind", KINDS)
def test_strided_input(device, kind, reduction, workspace, dtype):
    inputs = make_inputs(36, 8, 21, device=device, dtype=dtype)
    base, view = strided_like((3, 12, 8), kind, device, dtype)
    inputs = replace(inputs, input=view(base).requires_grad_(), target=inputs.target.view(3, 12))
    least = smallest_workspace(lambda workspace: fused(inputs, workspace=workspace, reduction=reduction))
    options = {"reduction": reduction, "workspace": None if workspace == "default" else 3 * least}
    result = differentiate(fused, inputs, **options)
    check(result, inputs, **options)

    leaf = base.clone().requires_grad_()
    loss = fused(replace(inputs, input=view(leaf)), **options)
    (through_view,) = torch.autograd.grad(loss.sum(), leaf)
    (expected,) = torch.autograd.grad(view(leaf), leaf, result["input"])
    assert torch.equal(through_view, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("workspace", ["default", "few rows"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("kind", ["transposed", "every other column", "every other row", "one row expanded"])
def test_strided_weight(device, kind, reduction, workspace, dtype):
    inputs = make_inputs(36, 8, 21, device=device, dtype=dtype)
    weight = {
        "transposed": lambda: torch.randn(8, 21).to(device, dtype).t(),
        "every other column": lambda: torch.randn(21, 16).to(device, dtype)[:, ::2],
        "every other row": lambda: torch.randn(42, 8).to(device, dtype)[::2],
        "one row expanded": lambda: torch.randn(8).to(device, dtype).expand(21, 8),
    }[kind]()
    inputs = replace(inputs, linear_weight=weight.requires_grad_())
    least = smallest_workspace(lambda workspace: fused(inputs, workspace=workspace, reduction=reduction))
    options = {"reduction": reduction, "workspace": None if workspace == "default" else 3 * least}
    check(differentiate(fused, inputs, **options), inputs, **options)


def test_strided_vectors(device):
    inputs = make_inputs(device=device, bias=True, class_weight=True)
    inputs = replace(
        inputs,
        target=torch.stack([inputs.target, inputs.target + 1], 1)[:, 0],
        linear_bias=torch.randn(126, device=device)[::2].requires_grad_(),
        weight=torch.rand((), device=device).expand(63),
    )
    check(differentiate(fused, inputs, label_smoothing=0.1), inputs, label_smoothing=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("leading", [(), (1,), (4,), (2, 3), (2, 1, 3), (0,), (2, 0)])
def test_leading_dimensions(device, leading, reduction, dtype):
    inputs = make_inputs(3, 8, 21, device=device, dtype=dtype)
    inputs = replace(
        inputs,
        input=torch.randn(*leading, 8).to(device, dtype).requires_grad_(),
        target=torch.randint(21, leading, device=device),
    )
    check(differentiate(fused, inputs, reduction=reduction), inputs, reduction=reduction)


@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
def test_integer_targets(device, integer):
    inputs = make_inputs(device=device)
    inputs = replace(inputs, target=inputs.target.to(integer))
    check(differentiate(fused, inputs), inputs)


def test_arguments_not_changed(device):
    inputs = make_inputs(device=device, bias=True, class_weight=True)
    tensors = {name: tensor for name, tensor in vars(inputs).items() if tensor is not None}
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    for reduction in ("mean", "none"):
        differentiate(fused, inputs, reduction=reduction, label_smoothing=0.1)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, before[name]), name
