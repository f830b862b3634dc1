"""torch.compile: one whole graph, forward and backward, for every length."""

import shutil
import warnings
from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad

import lowtide
from tests.ops.linear_cross_entropy.kinds import KINDS, REDUCTIONS, assert_close, small
from tests.support.extended import all_extended_but
from tests.support.graphs import needs_tracing
from tests.support.loss import (
    Inputs,
    check,
    check_log_probs,
    dense,
    differentiate,
    differentiate_log_probs,
    fused,
    fused_log_probs,
    make_inputs,
)

pytestmark = [
    needs_tracing,
    # Dynamo itself reads .grad of an intermediate; the compiler imports torch.jit and others.
    pytest.mark.filterwarnings("ignore:The .grad attribute"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

LENGTHS = (32, 40, 17, 33)


@pytest.fixture(autouse=True)
def _nothing_is_zero_by_luck():
    """The compiler has its own torch.empty: conftest.py's would be traced."""


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def counter():
    """A backend that counts the graphs that it is given, forward with backward as one."""
    return CompileCounterWithBackend("aot_eager")


def compiled_with(backend, function=fused, **options):
    """The function of Inputs, as one graph of tensors, with something before and after."""
    dynamic = options.pop("dynamic", None)

    @torch.compile(backend=backend, fullgraph=True, dynamic=dynamic)
    def graph(tensors, **own):
        input, *others = tensors
        inputs = Inputs(input * 1, *others)
        return function(inputs, **own)

    def called(inputs, **own):
        return graph(tuple(vars(inputs).values()), **own)

    return called


def train(loss_of, inputs, upstream=0.3, **options):
    check(differentiate(loss_of, inputs, upstream, **options), inputs, upstream=upstream, **options)


@pytest.mark.parametrize(
    ("dtype", "kind"), [(torch.bfloat16, "plain"), *((torch.float32, kind) for kind in KINDS)]
)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_compile_one_graph(device, counter, reduction, kind, dtype):
    made, options = KINDS[kind]
    inputs = make_inputs(device=device, dtype=dtype, **made)
    loss_of = compiled_with(counter)
    for upstream in (0.3, -2.0):
        train(loss_of, inputs, upstream, reduction=reduction, **options)
    assert counter.frame_count == 1


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("workspace", [None, 100_000])
def test_backends_and_workspaces(device, counter, workspace, backend):
    if backend == "triton" and device == "cpu":
        pytest.skip("slow in the interpreter")
    train(compiled_with(counter), make_inputs(device=device), workspace=workspace, backend=backend)


@pytest.mark.parametrize("reduction", all_extended_but(["mean"], ["mean", "none"]))
@pytest.mark.parametrize("kind", all_extended_but(["all, classes"], KINDS))
def test_any_length_one_graph(device, counter, kind, reduction):
    """By dynamic=True; for numbers among the arguments Dynamo starts over in the first call."""
    made, options = KINDS[kind]
    loss_of = compiled_with(counter, dynamic=True)
    for length in LENGTHS:
        train(loss_of, make_inputs(length, device=device, **made), reduction=reduction, **options)
        if length == LENGTHS[0]:
            first = counter.frame_count
    assert counter.frame_count == first <= 2, "compiled again for another length"


@pytest.mark.parametrize(
    "option",
    all_extended_but(["logit_scale"], ["z_loss", "softcap", "label_smoothing", "logit_scale"]),
)
def test_numbers_constant_scale_not(device, counter, option):
    """Another value is another graph, and right; a length beside it is not."""
    loss_of = compiled_with(counter, dynamic=True)
    counts = []
    for value in (0.25, 0.5, 0.75):
        for length in LENGTHS[:2]:
            train(loss_of, make_inputs(length, device=device), **{option: value})
            counts.append(counter.frame_count)
    assert counts[2] == counts[3], "compiled again for another length"
    assert counts[4] == counts[5], "compiled again for another length"
    assert (counts[3] == counts[5]) == (option == "logit_scale")


def test_features_dynamic(device, counter):
    """The second number of features makes the graph general; no other compiles again."""
    loss_of = compiled_with(counter, dynamic=True)
    for features in (24, 40, 136, 520, 1200):
        train(loss_of, make_inputs(20, features, 640, device=device, dtype=torch.float32))
    assert counter.frame_count <= 2, "compiled again for another number of features"


def test_length_marked_dynamic(device, counter):
    """Others than it stay fixed."""
    loss_of = compiled_with(counter)
    for length in LENGTHS:
        inputs = make_inputs(length, device=device)
        for tensor in (inputs.input, inputs.target):
            torch._dynamo.mark_dynamic(tensor, 0)
        train(loss_of, inputs)
    assert counter.frame_count == 1, "compiled again for another length"


@pytest.mark.extended
def test_length_found_dynamic(device, counter):
    """By default the second length makes the graph general; no other compiles again."""
    loss_of = compiled_with(counter)
    for length in LENGTHS:
        train(loss_of, make_inputs(length, device=device))
    assert counter.frame_count <= 2


@pytest.mark.extended
def test_any_batch_size_one_graph(device, counter):
    """Two dynamic dimensions, and a shifted slice in the graph."""
    w = make_inputs(device=device).linear_weight

    @torch.compile(backend=counter, fullgraph=True, dynamic=True)
    def loss(hidden, tokens):
        return lowtide.linear_cross_entropy(hidden[:, :-1], w, tokens[:, 1:])

    for batch, length in ((2, 9), (3, 7), (4, 12)):
        hidden = torch.randn(batch, length, 19, device=device, requires_grad=True)
        tokens = torch.randint(63, (batch, length), device=device)
        found, expected = (
            torch.autograd.grad(f(hidden, tokens), (hidden, w))
            for f in (loss, lambda h, t: lowtide.linear_cross_entropy(h[:, :-1], w, t[:, 1:]))
        )
        for ours, eager in zip(found, expected):
            torch.testing.assert_close(ours, eager)
        if batch == 2:
            first = counter.frame_count
    assert counter.frame_count == first <= 2


@pytest.mark.parametrize("dynamic", all_extended_but([False], [False, True]))
def test_log_probs(device, counter, dynamic):
    log_probs_of = compiled_with(counter, fused_log_probs, dynamic=dynamic)
    for length in LENGTHS if dynamic else (37,):
        inputs = make_inputs(length, device=device, bias=True, logit_scale=True)
        upstream = [torch.randn(length, device=device) for _ in range(3)]
        found = differentiate_log_probs(log_probs_of, inputs, upstream, softcap=1.5)
        check_log_probs(found, inputs, upstream, softcap=1.5)
        if length in (37, LENGTHS[0]):
            first = counter.frame_count
    assert counter.frame_count == first <= 1 + dynamic


@pytest.mark.parametrize("frozen", all_extended_but(["input"], ["input", "linear_weight"]))
def test_frozen_operand(device, counter, frozen):
    inputs = make_inputs(device=device, bias=True)
    train(compiled_with(counter), replace(inputs, **{frozen: getattr(inputs, frozen).detach()}))
    assert counter.frame_count == 1


def test_no_grad(device, counter):
    inputs = make_inputs(device=device)
    expected = fused(inputs)
    loss_of = compiled_with(counter)
    with torch.no_grad():
        loss = loss_of(inputs)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, expected.detach())


@pytest.mark.parametrize("positions", [(), (2, 3)])
def test_module(device, counter, positions):
    criterion = lowtide.LinearCrossEntropyLoss(8, 7, out_features=positions, bias=True, device=device)
    compiled = torch.compile(criterion, backend=counter, fullgraph=True)
    hidden = torch.randn(5, 8, device=device, requires_grad=True)
    target = torch.randint(7, (5, *positions), device=device)
    leaves = (hidden, *criterion.parameters())
    found, expected = (
        torch.autograd.grad(module(hidden, target), leaves) for module in (compiled, criterion)
    )
    for ours, eager in zip(found, expected):
        torch.testing.assert_close(ours, eager)
    assert counter.frame_count == 1


@pytest.mark.extended
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_positions_any_length(device, counter, reduction):
    def step(x_ND, w_VPD, target_NP):
        return lowtide.linear_cross_entropy(x_ND, w_VPD, target_NP, reduction=reduction).sum()

    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=True)
    w_VPD = torch.randn(7, 3, 8, device=device, requires_grad=True)
    for length in LENGTHS:
        x_ND = torch.randn(length, 8, device=device, requires_grad=True)
        target_NP = torch.randint(7, (length, 3), device=device)
        found, expected = (
            torch.autograd.grad(each(x_ND, w_VPD, target_NP), (x_ND, w_VPD)) for each in (compiled, step)
        )
        for ours, eager in zip(found, expected):
            torch.testing.assert_close(ours, eager)
        if length == LENGTHS[0]:
            first = counter.frame_count
    assert counter.frame_count == first <= 2, "compiled again for another length"


def test_autocast_in_graph(device, counter):
    inputs = make_inputs(device=device)

    def under_autocast(inputs):
        with torch.autocast(device, dtype=torch.bfloat16):
            return fused(inputs)

    found = differentiate(compiled_with(counter, under_autocast), inputs)
    expected = differentiate(under_autocast, inputs)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor)
    assert counter.frame_count == 1


@pytest.mark.parametrize("reduction", all_extended_but(["mean"], ["mean", "none"]))
def test_inductor(device, reduction):
    """The real compiler, with work before and after to fuse."""
    if device == "cpu" and not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("needs a C++ compiler")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own imports give warnings
        loss_of = compiled_with("inductor", dynamic=True)
        for length in (32, 40):
            inputs = make_inputs(length, device=device, bias=True, logit_scale=True)
            train(loss_of, inputs, reduction=reduction, z_loss=0.1, softcap=3.0)


def test_same_bits_as_eager(device, counter):
    inputs = make_inputs(device=device, bias=True)
    expected = differentiate(fused, inputs, 0.3)
    for name, tensor in differentiate(compiled_with(counter), inputs, 0.3).items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("compiled_autograd", [False, True])
def test_gradients_of_labels(device, compiled_autograd):
    """Those of probabilities and class weights break the graph, and fullgraph=True refuses them."""
    inputs, options = small(device, "all, probabilities")
    leaves = {**inputs.leaves(), "target": inputs.target, "weight": inputs.weight}
    for leaf in leaves.values():
        leaf.requires_grad_()

    def step(tensors):
        fused(Inputs(*tensors), **options).backward()

    tensors = tuple(vars(inputs).values())
    with torch._dynamo.config.patch(compiled_autograd=compiled_autograd):
        torch.compile(step, backend="aot_eager")(tensors)
    expected = torch.autograd.grad(dense(inputs, **options), tuple(leaves.values()))
    assert_close([leaf.grad for leaf in leaves.values()], expected)
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"or\s+detach what needs no gradient"):
        torch.compile(step, backend="aot_eager", fullgraph=True)(tensors)


# fullgraph=True refuses transforms that do not combine. Without it, the result is right, or is
# refused.


@pytest.mark.extended
@pytest.mark.parametrize("transform", ["jvp", "dual", "grad", "vmap"])
@pytest.mark.parametrize("entropy", [False, True])
def test_transform_in_graph_right_or_refused(device, transform, entropy):
    inputs = make_inputs(device=device, ignored=0.0)
    x, w = inputs.input.detach(), inputs.linear_weight.detach()

    def loss(w):
        if entropy:
            return lowtide.linear_log_probs(x, w, inputs.target).entropy.sum()
        return lowtide.linear_cross_entropy(x, w, inputs.target)

    def dual(w):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(loss(forward_ad.make_dual(w, w))).tangent

    transformed = {
        "jvp": lambda w: torch.func.jvp(loss, (w,), (w,))[1],
        "dual": dual,
        "grad": lambda w: torch.func.grad(loss)(w),
        "vmap": lambda w: torch.vmap(loss)(w[None]),
    }[transform]
    torch.compiler.reset()
    expected = transformed(w)
    try:
        found = torch.compile(transformed, backend="eager")(w)
    except AssertionError:  # Dynamo's, where it resumes inside torch.func.grad
        assert transform == "grad"
    else:
        torch.testing.assert_close(found, expected)
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        torch.compile(transformed, backend="eager", fullgraph=True)(w)
    torch.compiler.reset()
