"""In the place of torch.nn.functional.linear_cross_entropy (torch 2.13, without `options`): what it
accepts gives the same here, value and gradients. Its edges, errors and modules are in the files
beside this one.

Shapes: N rows, D features, V classes, d1 ... dK positions.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import lowtide
from tests.ops.linear_cross_entropy.calls import NAMES, REDUCTIONS, D, check_same, make_call, outcome, theirs
from tests.support.loss import norm


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1])
@pytest.mark.parametrize("class_weight", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("positions", [(), (3,), (1, 1), (2, 3), (2, 1, 2)])
def test_class_indices(device, positions, reduction, bias, class_weight, smoothing):
    for ignored in (None, -100, 2):
        arguments = make_call(positions, device=device, bias=bias, class_weight=class_weight, ignored=ignored)
        options = {} if ignored is None else {"ignore_index": ignored}
        check_same(arguments, reduction=reduction, label_smoothing=smoothing, **options)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1])
@pytest.mark.parametrize("class_weight", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("positions", [(), (1,), (3,), (2, 3)])
def test_class_probabilities(device, positions, reduction, bias, class_weight, smoothing):
    """Also their gradient, and that of the class weights beside them."""
    arguments = make_call(positions, device=device, bias=bias, class_weight=class_weight, probabilities=True)
    options = {"reduction": reduction, "label_smoothing": smoothing}
    check_same(arguments, **options)
    check_same(arguments, NAMES, **options)


@pytest.mark.parametrize(("reduction", "products"), [("mean", 3), ("sum", 3), ("none", 4)])
def test_one_position_flops(device, reduction, products):
    arguments = make_call((1,), device=device, bias=True)
    with FlopCounterMode(display=False) as counter:
        outcome(lowtide.linear_cross_entropy, arguments, ("input", "linear_weight"), reduction=reduction)
    (rows, features), classes = arguments["input"].shape, arguments["linear_weight"].shape[0]
    assert counter.get_total_flops() == products * 2 * rows * features * classes


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_one_position_matches_one_head(device, reduction):
    """The same operators with the same arguments, so that it takes as long, and the same bits."""

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), named=None):
            if function.namespace == "lowtide":
                given = [
                    (each.shape, each.stride()) if isinstance(each, torch.Tensor) else each
                    for each in tree_leaves(arguments)
                ]
                found.append((function, given))
            return function(*arguments, **(named or {}))

    arguments = make_call((1,), device=device)
    plain = arguments | {
        "linear_weight": arguments["linear_weight"][:, 0],
        "target": arguments["target"][:, 0],
    }
    results, calls = [], []
    for each in (arguments, plain):
        found = []
        with Calls():
            results.append(
                outcome(lowtide.linear_cross_entropy, each, ("input", "linear_weight"), reduction=reduction)
            )
        calls.append(found)
    assert calls[0] == calls[1]
    assert len(calls[0]) == (2 if reduction == "none" else 1)
    for name, tensor in results[0].items():
        assert torch.equal(tensor, results[1][name].view_as(tensor))


@pytest.mark.parametrize("probabilities", [False, True])
@pytest.mark.parametrize("class_weight", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_unbatched(device, reduction, bias, class_weight, probabilities):
    arguments = make_call(
        device=device, batched=False, bias=bias, class_weight=class_weight, probabilities=probabilities
    )
    for smoothing in (0.0, 0.1):
        check_same(arguments, reduction=reduction, label_smoothing=smoothing)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_unbatched_and_ignored(device, reduction):
    arguments = make_call(device=device, batched=False) | {"target": torch.tensor(-100, device=device)}
    check_same(arguments, reduction=reduction)


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_unbatched_with_target_vector(device, reduction, ignored):
    """Torch takes it in forward, and cannot differentiate: the gradients are the class's alone."""
    arguments = make_call(device=device, batched=False)
    target = arguments["target"]
    options = {"reduction": reduction, "ignore_index": target.item() if ignored else None}
    vector = arguments | {"target": target.view(1)}
    with torch.no_grad():
        expected = theirs(**vector, **options)
        torch.testing.assert_close(
            lowtide.linear_cross_entropy(**vector, **options), expected, rtol=1e-13, atol=0, equal_nan=True
        )
    found, alone = (
        outcome(lowtide.linear_cross_entropy, each, ("input", "linear_weight"), **options)
        for each in (vector, arguments)
    )
    for name, tensor in alone.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("class_weight", [None, torch.float16, torch.float64])
@pytest.mark.parametrize("target", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("positions", [(), (3,)])
def test_probabilities_and_weights_of_other_dtypes(device, positions, target, class_weight, reduction):
    """The loss is as wide as the widest of them."""
    weighted = class_weight is not None
    made = {"dtype": torch.float32, "probabilities": True, "class_weight": weighted}
    arguments = make_call(positions, device=device, **made)
    arguments["target"] = arguments["target"].to(target)
    if weighted:
        arguments["weight"] = arguments["weight"].to(class_weight)
    check_same(arguments, reduction=reduction)
    if target == torch.float64:  # torch smooths those of bfloat16 in bfloat16
        check_same(arguments, reduction=reduction, label_smoothing=0.1)
        check_same(arguments, ("input", "linear_weight", "target"), reduction=reduction)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16, torch.bool])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_class_weight_of_integers_with_probabilities(device, reduction, dtype):
    for positions in ((), (2,)):
        arguments = make_call(positions, device=device, probabilities=True)
        arguments["weight"] = torch.arange(7, device=device).to(dtype)
        check_same(arguments, reduction=reduction, label_smoothing=0.1)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_uint8_targets(device, reduction):
    arguments = make_call(device=device, integer=torch.uint8, ignored=3)
    check_same(arguments, reduction=reduction, ignore_index=3)
    check_same(arguments, reduction=reduction)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("ignore_index", [None, -100, 156 - 512])
def test_uint8_target_never_negative_ignore_index(device, reduction, ignore_index):
    """Class 156 is not -100, though its byte is."""
    arguments = make_call(device=device) | {
        "linear_weight": torch.randn(200, D, dtype=torch.float64, device=device),
        "target": torch.tensor([156, 3, 156, 199, 0, 156], dtype=torch.uint8, device=device),
    }
    check_same(arguments, reduction=reduction, ignore_index=ignore_index)


@pytest.mark.parametrize("ignore_index", [-(2**63), -1, 0, 6, 7, 2**31 + 3, 2**63 - 1])
def test_ignore_index_any_value(device, ignore_index):
    arguments = make_call(device=device, ignored=ignore_index)
    for reduction in REDUCTIONS:
        check_same(arguments, reduction=reduction, ignore_index=ignore_index)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("probabilities", [False, True])
@pytest.mark.parametrize("positions", [(), (2, 3)])
def test_float32(device, positions, probabilities, reduction):
    arguments = make_call(
        positions,
        device=device,
        dtype=torch.float32,
        bias=True,
        class_weight=True,
        probabilities=probabilities,
    )
    check_same(arguments, reduction=reduction, label_smoothing=0.1)


@pytest.mark.parametrize("probabilities", [False, True])
def test_no_grad_class_weight_requires_gradient(device, probabilities):
    arguments = make_call(device=device, class_weight=True, probabilities=probabilities)
    arguments["weight"].requires_grad_()
    with torch.no_grad():
        expected, found = (f(**arguments) for f in (theirs, lowtide.linear_cross_entropy))
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize("positions", [(), (3,)])
def test_any_strides(device, positions):
    arguments = make_call(positions, device=device, bias=True, probabilities=True)
    for name in ("input", "linear_weight", "target", "linear_bias"):
        tensor = arguments[name]
        arguments[name] = (
            torch.stack([tensor, tensor + 1], -1)[..., 0].movedim(0, -1).contiguous().movedim(-1, 0)
        )
        assert torch.equal(arguments[name], tensor)
    check_same(arguments)


def test_positions_input_rounded_once(device):
    """Its gradient is a sum over positions."""
    x, w = torch.randn(16, 8), torch.randn(7, 64, 8)
    target = torch.randint(7, (16, 64))
    exact = x.bfloat16().double().requires_grad_()
    theirs(exact, w.bfloat16().double(), target).backward()
    ours = x.to(device, torch.bfloat16).requires_grad_()
    lowtide.linear_cross_entropy(ours, w.to(device, torch.bfloat16), target.to(device)).backward()
    error = norm(ours.grad.double().cpu() - exact.grad) / norm(exact.grad)
    assert error <= 2.5e-3


def dense_with_options(
    input, linear_weight, target, *, linear_bias, weight, logit_scale, softcap, z_loss, reduction, **options
):
    classes, *positions = linear_weight.shape[:-1]
    u = F.linear(input, linear_weight.flatten(0, -2), linear_bias.flatten()).view(-1, classes, *positions)
    z = softcap * torch.tanh(logit_scale * u / softcap)
    of_target = weight[target.clamp(min=0)] * (target != -100)
    rows = F.cross_entropy(z, target, weight, reduction="none", **options)
    rows = rows + z_loss * z.logsumexp(1) ** 2 * (target != -100)
    if reduction == "none":
        return rows
    return rows.sum() / (of_target.sum() if reduction == "mean" else 1)


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("positions", [(3,), (2, 3)])
def test_positions_own_options(device, positions, reduction, small):
    """Soft cap, learned scale and z-loss beside smoothing, class weights, ignored rows; in vmap."""
    arguments = make_call(positions, device=device, bias=True, class_weight=True, ignored=-100)
    arguments["scale"] = torch.tensor(0.7, dtype=torch.float64, device=device)
    options = {"softcap": 1.5, "z_loss": 0.3, "label_smoothing": 0.1, "reduction": reduction}
    names = ("input", "linear_weight", "linear_bias", "scale")

    def differentiated(function):
        leaves = {name: arguments[name].clone().requires_grad_() for name in names}
        input, linear_weight, linear_bias, scale = leaves.values()
        loss = function(
            input, linear_weight, arguments["target"], linear_bias=linear_bias, weight=arguments["weight"],
            logit_scale=scale, **options,
        )  # fmt: skip
        torch.manual_seed(1)
        upstream = torch.randn(loss.shape, dtype=torch.float64).to(loss)
        return loss, *torch.autograd.grad(loss, tuple(leaves.values()), upstream)

    least = 12_000 if device == "cpu" else 70_000
    ours = functools.partial(lowtide.linear_cross_entropy, workspace=least if small else None)
    for found, expected in zip(differentiated(ours), differentiated(dense_with_options)):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    if reduction == "sum":
        fixed = {name: arguments[name] for name in ("linear_bias", "weight")}
        batch = torch.stack([arguments["input"], 2 * arguments["input"]])

        def per_sample(function):
            options_of_loss = {**fixed, "logit_scale": arguments["scale"], **options}
            loss = functools.partial(function, target=arguments["target"], **options_of_loss)
            return torch.func.vmap(torch.func.grad(loss), in_dims=(0, None))(
                batch, arguments["linear_weight"]
            )

        torch.testing.assert_close(per_sample(ours), per_sample(dense_with_options), rtol=1e-12, atol=1e-12)
