"""A call of torch.nn.functional.linear_cross_entropy, and ours: same loss, same gradients.

Shapes: N rows, D features, V classes, d1 ... dK positions.
"""

import math

import pytest
import torch
from torch.nn import functional as F

import lowtide

N, D, V = 6, 5, 7
REDUCTIONS = ("mean", "sum", "none")
NAMES = ("input", "linear_weight", "target", "linear_bias", "weight")

needs_torchs_own = pytest.mark.skipif(
    not hasattr(F, "linear_cross_entropy"), reason="torch has linear_cross_entropy from 2.13 on"
)


def theirs(input, linear_weight, target, *, linear_bias=None, ignore_index=None, **options):
    """torch's; before it had one, what it stands for."""
    if input.is_cuda and input.dim() == 1:
        # The mean over one row that is ignored is NaN in torch, but 0 without a batch on CUDA.
        batch = target if target.shape == (1,) and not target.is_floating_point() else target[None]
        own = {"linear_bias": linear_bias, "ignore_index": ignore_index}
        loss = theirs(input[None], linear_weight, batch, **own, **options)
        return loss[0] if options.get("reduction") == "none" else loss
    if hasattr(F, "linear_cross_entropy"):
        own = {"linear_bias": linear_bias, "ignore_index": ignore_index}
        return F.linear_cross_entropy(input, linear_weight, target, **own, **options)
    bias = None if linear_bias is None else linear_bias.flatten()
    classes = math.prod(linear_weight.shape[:-1])
    logits = F.linear(input, linear_weight.reshape(classes, linear_weight.shape[-1]), bias)
    logits = logits.reshape(*input.shape[:-1], *linear_weight.shape[:-1])
    return F.cross_entropy(
        logits, target, ignore_index=-100 if ignore_index is None else ignore_index, **options
    )


def make_call(
    positions=(),
    *,
    device="cpu",
    dtype=torch.float64,
    batched=True,
    rows=N,
    classes=V,
    features=D,
    probabilities=False,
    bias=False,
    class_weight=False,
    integer=torch.int64,
    ignored=None,
):
    """The arguments of a call, by name."""
    leading = (rows,) if batched else ()

    def randn(*shape):
        return torch.randn(shape, dtype=torch.float64).to(device, dtype)

    if probabilities:
        target = randn(*leading, classes, *positions).softmax(1 if batched else 0)
    else:
        target = torch.randint(max(classes, 1), (*leading, *positions), device=device)
        if ignored is not None:
            target[torch.rand(target.shape, device=device) < 0.4] = ignored
        target = target.to(integer)
    return {
        "input": randn(*leading, features),
        "linear_weight": randn(classes, *positions, features),
        "target": target,
        "linear_bias": randn(classes, *positions) if bias else None,
        "weight": torch.rand(classes).add(0.5).to(device, dtype) if class_weight else None,
    }


def outcome(function, arguments, differentiable, upstream=None, **options):
    """The loss and the gradients of the arguments named in `differentiable`."""
    leaves = {
        name: tensor.detach().clone().requires_grad_()
        for name in differentiable
        if (tensor := arguments[name]) is not None
    }
    input, linear_weight, target, linear_bias, weight = (leaves.get(name, arguments[name]) for name in NAMES)
    loss = function(input, linear_weight, target, linear_bias=linear_bias, weight=weight, **options)
    seed = torch.ones_like(loss) if upstream is None else upstream.to(loss.dtype).reshape(loss.shape)
    return {
        "loss": loss.detach(),
        **dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()), seed))),
    }


def check_same(arguments, differentiable=("input", "linear_weight", "linear_bias"), **options):
    expected = outcome(theirs, arguments, differentiable, **options)
    upstream = torch.randn(expected["loss"].shape, device=expected["loss"].device)
    expected = outcome(theirs, arguments, differentiable, upstream, **options)
    found = outcome(lowtide.linear_cross_entropy, arguments, differentiable, upstream, **options)
    eps = torch.finfo(arguments["input"].dtype).eps
    for name, tensor in expected.items():
        # assert_close also compares shapes, dtypes and devices; NaN is NaN in both.
        torch.testing.assert_close(
            found[name],
            tensor,
            rtol=100 * eps,
            atol=100 * eps,
            equal_nan=True,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def check_same_or_error(arguments, **options):
    try:
        theirs(**arguments, **options)
    except Exception as error:
        check_error(error, arguments | options)
    else:
        check_same(arguments, **options)


def check_error(expected, arguments):
    """Ours is caught as torch's own would be."""
    with pytest.raises((ValueError, TypeError, IndexError)) as ours:
        lowtide.linear_cross_entropy(**arguments)
    (kind,) = {ValueError, TypeError, IndexError, RuntimeError} & set(type(expected).__mro__)
    assert isinstance(ours.value, kind), f"torch: {expected!r}, lowtide: {ours.value!r}"


def torchs_samples():
    """Of torch's test of the function, those without `options`."""
    database = pytest.importorskip("torch.testing._internal.common_methods_invocations")
    found = [op for op in database.op_db if op.name == "nn.functional.linear_cross_entropy"]
    if not found:
        pytest.skip("torch has no samples of it")
    return found[0]
