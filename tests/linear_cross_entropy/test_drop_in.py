"""In the place of torch.nn.functional.linear_cross_entropy (torch 2.13, without `options`): what it accepts
gives the same here, value and gradients; what it refuses is refused, by an error that is caught as its own
would be.

Shapes: N rows, D features, V classes, d1 ... dK positions.
"""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lowtide
from tests.helpers import norm

pytestmark = pytest.mark.skipif(
    not hasattr(F, "linear_cross_entropy"), reason="torch has linear_cross_entropy from 2.13 on"
)

N, D, V = 6, 5, 7
REDUCTIONS = ("mean", "sum", "none")
NAMES = ("input", "linear_weight", "target", "linear_bias", "weight")


def make_call(
    positions=(),
    *,
    device="cpu",
    dtype=torch.float64,
    batched=True,
    rows=N,
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
        target = randn(*leading, V, *positions).softmax(1 if batched else 0)
    else:
        target = torch.randint(V, (*leading, *positions), device=device)
        if ignored is not None:
            target[torch.rand(target.shape, device=device) < 0.4] = ignored
        target = target.to(integer)
    return {
        "input": randn(*leading, features),
        "linear_weight": randn(V, *positions, features),
        "target": target,
        "linear_bias": randn(V, *positions) if bias else None,
        "weight": torch.rand(V).add(0.5).to(device, dtype) if class_weight else None,
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
    expected = outcome(F.linear_cross_entropy, arguments, differentiable, **options)
    upstream = torch.randn(expected["loss"].shape, device=expected["loss"].device)
    expected = outcome(F.linear_cross_entropy, arguments, differentiable, upstream, **options)
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


# Calls that torch accepts.


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1])
@pytest.mark.parametrize("class_weight", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("positions", [(), (3,), (2, 3), (2, 1, 2)])
def test_class_indices(device, positions, reduction, bias, class_weight, smoothing):
    for ignored in (None, -100, 2):
        arguments = make_call(positions, device=device, bias=bias, class_weight=class_weight, ignored=ignored)
        options = {} if ignored is None else {"ignore_index": ignored}
        check_same(arguments, reduction=reduction, label_smoothing=smoothing, **options)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1])
@pytest.mark.parametrize("class_weight", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("positions", [(), (3,), (2, 3)])
def test_class_probabilities(device, positions, reduction, bias, class_weight, smoothing):
    """Also their gradient, and that of the class weights beside them."""
    arguments = make_call(positions, device=device, bias=bias, class_weight=class_weight, probabilities=True)
    options = {"reduction": reduction, "label_smoothing": smoothing}
    check_same(arguments, **options)
    check_same(arguments, NAMES, **options)


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


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_targets_of_bytes(device, reduction):
    arguments = make_call(device=device, integer=torch.uint8, ignored=3)
    check_same(arguments, reduction=reduction, ignore_index=3)
    check_same(arguments, reduction=reduction)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("ignore_index", [None, -100, 156 - 512])
def test_a_byte_is_never_a_negative_ignore_index(device, reduction, ignore_index):
    """Class 156 is not -100, though its byte is."""
    arguments = make_call(device=device) | {
        "linear_weight": torch.randn(200, D, dtype=torch.float64, device=device),
        "target": torch.tensor([156, 3, 156, 199, 0, 156], dtype=torch.uint8, device=device),
    }
    check_same(arguments, reduction=reduction, ignore_index=ignore_index)


@pytest.mark.parametrize("ignore_index", [-(2**63), -1, 0, 6, 7, 2**31 + 3, 2**63 - 1])
def test_any_ignore_index(device, ignore_index):
    arguments = make_call(device=device, ignored=ignore_index)
    for reduction in REDUCTIONS:
        check_same(arguments, reduction=reduction, ignore_index=ignore_index)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("class_weight", [False, True])
@pytest.mark.parametrize("positions", [(), (3,)])
def test_nothing_counts(device, positions, class_weight, reduction):
    for arguments in (
        make_call(positions, device=device, rows=0, class_weight=class_weight),
        make_call(positions, device=device, rows=0, class_weight=class_weight, probabilities=True),
        make_call(positions, device=device, class_weight=class_weight)
        | {"target": torch.full((N, *positions), -100, device=device)},
    ):
        for smoothing in (0.0, 0.1):
            check_same(arguments, reduction=reduction, label_smoothing=smoothing)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_class_weights_of_zero(device, reduction):
    """The mean of rows that all weigh nothing is 0 / 0."""
    arguments = make_call(device=device, class_weight=True)
    for zeros in (slice(0, 2), slice(None)):
        weight = arguments["weight"].clone()
        weight[zeros] = 0
        for smoothing in (0.0, 0.1):
            check_same(arguments | {"weight": weight}, reduction=reduction, label_smoothing=smoothing)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("probabilities", [False, True])
def test_one_class(device, probabilities, reduction):
    """With one row also: a target of one number may be a class or a probability. Its dtype tells."""
    for rows in (1, N):
        arguments = make_call(device=device, rows=rows, class_weight=True)
        arguments["linear_weight"] = arguments["linear_weight"][:1]
        arguments["weight"] = arguments["weight"][:1]
        target = torch.rand(rows, 1, dtype=torch.float64) if probabilities else torch.zeros(rows).long()
        check_same(arguments | {"target": target.to(device)}, reduction=reduction)


def test_no_features(device):
    for reduction in REDUCTIONS:
        check_same(make_call(device=device, features=0, bias=True), reduction=reduction)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("probabilities", [False, True])
def test_what_is_not_finite(device, probabilities, value):
    for name, reduction in itertools.product(("input", "linear_weight", "linear_bias"), REDUCTIONS):
        arguments = make_call(device=device, bias=True, probabilities=probabilities)
        arguments[name] = arguments[name].clone()
        arguments[name].view(-1)[1] = value
        check_same(arguments, reduction=reduction)


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
def test_class_weights_that_would_need_a_gradient_where_none_is_taken(device, probabilities):
    arguments = make_call(device=device, class_weight=True, probabilities=probabilities)
    arguments["weight"].requires_grad_()
    with torch.no_grad():
        expected, found = (f(**arguments) for f in (F.linear_cross_entropy, lowtide.linear_cross_entropy))
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


# Calls that torch refuses.

x, w, t = torch.randn(N, D), torch.randn(V, D), torch.randint(V, (N,))
w_K, t_K = torch.randn(V, 2, 3, D), torch.randint(V, (N, 2, 3))
p, ones = torch.rand(N, V), torch.ones(V)

REFUSED = {
    "0-d input": {"input": x[0, 0]},
    "weight 1-d": {"linear_weight": w[0]},
    "weight transposed": {"linear_weight": w.t()},
    "other features": {"input": x[:, :-1]},
    "target too short": {"target": t[:-1]},
    "target too long": {"target": torch.zeros(N + 1).long()},
    "target 2-d": {"target": t[:, None]},
    "target 0-d": {"target": t[0]},
    "probabilities too short": {"target": p[:-1]},
    "probabilities of other classes": {"target": p[:, :-1]},
    "probabilities of integers": {"target": p.long()},
    "probabilities of booleans": {"target": p > 0.5},
    "probabilities that are complex": {"target": p + 0j},
    "probabilities and ignore_index": {"target": p, "ignore_index": -100},
    "float target": {"target": t.float()},
    "int16 target": {"target": t.short()},
    "bool target": {"target": t > 0},
    "bias too short": {"linear_bias": ones[:-1]},
    "bias 2-d": {"linear_bias": ones[None]},
    "class weights too long": {"weight": torch.ones(V + 1)},
    "class weights 2-d": {"weight": ones[None]},
    "class weights 0-d": {"weight": ones[0]},
    "class weights beside probabilities, too long": {"target": p, "weight": torch.ones(V + 1)},
    "class weights beside probabilities, 2-d": {"target": p, "weight": ones[None]},
    "class weights that need a gradient": {"weight": torch.ones(V, requires_grad=True)},
    "weight in float64": {"linear_weight": w.double()},
    "bias in float64": {"linear_bias": ones.double()},
    "integer input": {"input": x.long(), "linear_weight": w.long()},
    "complex input": {"input": x + 0j, "linear_weight": w + 0j},
    "class too large": {"target": torch.full((N,), V)},
    "class below 0": {"target": torch.full((N,), -1)},
    "-100 where another is ignored": {"target": torch.full((N,), -100), "ignore_index": 0},
    "reduction": {"reduction": "avg"},
    "reduction None": {"reduction": None},
    "smoothing above 1": {"label_smoothing": 1.1},
    "smoothing a string": {"label_smoothing": "0.1"},
    "smoothing None": {"label_smoothing": None},
    "ignore_index a float": {"ignore_index": 1.0},
    "ignore_index a bool": {"ignore_index": True},
    "ignore_index a string": {"ignore_index": "1"},
    "ignore_index beyond 64 bits": {"ignore_index": 2**63},
    "K: unbatched": {"input": x[0], "linear_weight": w_K, "target": t_K[0]},
    "K: target without positions": {"linear_weight": w_K},
    "K: target of other positions": {"linear_weight": w_K, "target": t_K[..., :-1]},
    "K: target transposed": {"linear_weight": w_K, "target": t_K.transpose(1, 2)},
    "K: probabilities with classes last": {"linear_weight": w_K, "target": torch.rand(N, 2, 3, V)},
    "K: bias without positions": {"linear_weight": w_K, "target": t_K, "linear_bias": ones},
    "K: bias flat": {"linear_weight": w_K, "target": t_K, "linear_bias": torch.ones(6 * V)},
    "K: class too large": {"linear_weight": w_K, "target": t_K + V},
    "K: other features": {"linear_weight": w_K[..., :-1], "target": t_K},
    "K: class weights too long": {"linear_weight": w_K, "target": t_K, "weight": torch.ones(V + 1)},
    "K: float target": {"linear_weight": w_K, "target": t_K.float()},
    "K: reduction": {"linear_weight": w_K, "target": t_K, "reduction": "avg"},
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_the_same_kind_of_error(what):
    arguments = {"input": x, "linear_weight": w, "target": t} | REFUSED[what]
    with pytest.raises(Exception) as theirs:  # noqa: PT011
        F.linear_cross_entropy(**arguments)
    with pytest.raises((ValueError, TypeError, IndexError)) as ours:
        lowtide.linear_cross_entropy(**arguments)
    (kind,) = {ValueError, TypeError, IndexError, RuntimeError} & set(theirs.type.__mro__)
    assert isinstance(ours.value, kind), f"torch: {theirs.value!r}, lowtide: {ours.value!r}"


# Modules.


@pytest.mark.parametrize("probabilities", [False, True])
@pytest.mark.parametrize("class_weight", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("positions", [(), (3,), (2, 3)])
def test_modules(device, positions, bias, class_weight, probabilities):
    """With the parameters of torch's own, by load_state_dict."""
    arguments = make_call(positions, device=device, class_weight=class_weight, probabilities=probabilities)
    options = {"out_features": positions, "bias": bias, "weight": arguments["weight"], "label_smoothing": 0.1}
    options |= {"device": device, "dtype": torch.float64}
    theirs = nn.LinearCrossEntropyLoss(D, V, **options)
    ours = lowtide.LinearCrossEntropyLoss(D, V, **options)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    ours.load_state_dict(theirs.state_dict())
    losses = [module(arguments["input"], arguments["target"]) for module in (theirs, ours)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=0)
    gradients = [
        torch.autograd.grad(loss, list(module.parameters())) for loss, module in zip(losses, (theirs, ours))
    ]
    for expected, found in zip(*gradients):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("positions", [(), (2, 3)])
def test_one_weight_for_both_modules(device, positions, reduction):
    theirs = nn.LinearCrossEntropyLoss(
        D, V, out_features=positions, bias=True, reduction=reduction, ignore_index=1, device=device
    ).double()
    ours = lowtide.LinearCrossEntropyLoss(
        D, V, out_features=positions, bias=True, reduction=reduction, ignore_index=1, device=device
    ).double()
    ours.linear.weight, ours.linear.bias = theirs.linear.weight, theirs.linear.bias
    arguments = make_call(positions, device=device, ignored=1)
    both = []
    for module in (theirs, ours):
        loss = module(arguments["input"], arguments["target"])
        both.append((loss.detach(), *torch.autograd.grad(loss.sum(), list(module.parameters()))))
    for expected, found in zip(*both):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


# torch's own samples.


def samples():
    """Of torch's test of the function, those without `options`."""
    database = pytest.importorskip("torch.testing._internal.common_methods_invocations")
    found = [op for op in database.op_db if op.name == "nn.functional.linear_cross_entropy"]
    if not found:
        pytest.skip("torch has no samples of it")
    return found[0]


@pytest.mark.filterwarnings("ignore")
def test_samples_of_torch(device):
    count = 0
    for sample in samples().sample_inputs(device, torch.float64, requires_grad=False):
        (linear_weight, target), options = sample.args, dict(sample.kwargs)
        if options.pop("options", None) is not None:
            continue
        arguments = {"input": sample.input, "linear_weight": linear_weight, "target": target}
        arguments |= {name: options.pop(name, None) for name in ("linear_bias", "weight")}
        check_same(arguments, **options)
        count += 1
    assert count > 10


@pytest.mark.filterwarnings("ignore")
def test_error_samples_of_torch(device):
    op = samples()
    if op.error_inputs_func is None:
        pytest.skip("torch has no error samples of it")
    count = 0
    for error in op.error_inputs(device):
        sample = error.sample_input
        if sample.kwargs.get("options") is not None:
            continue
        with pytest.raises(error.error_type):
            lowtide.linear_cross_entropy(
                sample.input, *sample.args, **{k: v for k, v in sample.kwargs.items() if k != "options"}
            )
        count += 1
    assert count > 0


def test_the_input_of_a_k_dimensional_loss_is_rounded_once(device):
    """Its gradient is a sum over positions."""
    x, w = torch.randn(16, 8), torch.randn(7, 64, 8)
    target = torch.randint(7, (16, 64))
    exact = x.bfloat16().double().requires_grad_()
    torch.nn.functional.linear_cross_entropy(exact, w.bfloat16().double(), target).backward()
    ours = x.to(device, torch.bfloat16).requires_grad_()
    lowtide.linear_cross_entropy(ours, w.to(device, torch.bfloat16), target.to(device)).backward()
    error = norm(ours.grad.double().cpu() - exact.grad) / norm(exact.grad)
    assert error <= 2.5e-3
