"""normalizer, what a mean divides by in place of its count: on every engine, in every derivative.

Shapes: N tokens, D features, V classes, P positions.
"""

import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import lowtide
from lowtide.ops.linear_cross_entropy.definition.head import Options, number_beside
from lowtide.ops.linear_cross_entropy.dispatch import cross_entropy
from lowtide.ops.linear_cross_entropy.engines.cpu_exponentials import spec as cpu_spec
from lowtide.ops.linear_cross_entropy.engines.cpu_exponentials.gemm import gemm
from lowtide.ops.linear_cross_entropy.operator.fake import with_new_graph_facts
from tests.ops.linear_cross_entropy import kinds
from tests.ops.linear_cross_entropy.calls import make_call
from tests.ops.linear_cross_entropy.on_exponentials import dtype_on, put_everywhere
from tests.ops.linear_cross_entropy.options.test_options import DTYPES, KINDS
from tests.ops.linear_cross_entropy.options.test_several_terms import in_terms
from tests.support.loss import (
    HALVES,
    check,
    dense,
    differentiate,
    fused,
    make_inputs,
    no_synchronisation,
    planned,
    skip_unless_runnable,
    smallest_workspace,
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
COUNT = 53.7  # tokens of all ranks and micro-batches
COUNT_DTYPES = (torch.int64, torch.int32, torch.float64, torch.half)


def made_of(*sizes, kind="plain", **changes):
    made, options = {**KINDS, "plain": ({}, {})}[kind]
    return make_inputs(*sizes, **made | changes), options


def check_normalized(inputs, loss_of=fused, **options):
    options = options | {"normalizer": COUNT}
    check(differentiate(loss_of, inputs, -0.7, **options), inputs, upstream=-0.7, **options)


# Each engine.


@pytest.mark.parametrize("workspace", ["default", "few"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["plain", *KINDS])
def test_with_each_option(device, kind, dtype, workspace):
    inputs, options = made_of(device=device, dtype=dtype, kind=kind)
    for backend in ("auto", "torch") if device == "cuda" else ("torch",):
        chosen, bytes = options | {"backend": backend}, None
        if workspace == "few":
            bytes = 2 * smallest_workspace(lambda size, own=chosen: fused(inputs, workspace=size, **own))
        check_normalized(inputs, workspace=bytes, **chosen)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("kind", ["plain", *ALL])
def test_triton(device, kind, dtype):
    skip_unless_runnable("triton", device)
    inputs, options = made_of(5, 3, 21, device=device, dtype=dtype, kind=kind, ignored=0.4)
    check_normalized(inputs, backend="triton", **options)


@pytest.mark.parametrize("kind", ["exponentials", "soft_targets"])
def test_on_hopper(device, kind, monkeypatch):
    pytest.importorskip("triton")
    put_everywhere(device, monkeypatch)
    inputs = make_inputs(
        37, 24, 112, device=device, dtype=dtype_on(device), bias=True, probabilities=kind == "soft_targets"
    )
    assert getattr(planned(inputs, None, backend="triton"), kind)
    check_normalized(inputs, backend="triton")


def test_cpu_exponentials(monkeypatch):
    if not gemm.available():
        pytest.skip("this CPU has no units for bfloat16, or there is no compiler")
    monkeypatch.setattr(cpu_spec, "FEWEST_WEIGHTS", 0)
    inputs = make_inputs(370, 160, 503, dtype=torch.bfloat16, bias=True, class_weight=True)
    assert planned(inputs, None, z_loss=0.01).cpu_exponentials
    check_normalized(inputs, z_loss=0.01)


@pytest.mark.parametrize("kind", ["plain", *KINDS])
def test_reference(device, kind):
    inputs, options = made_of(device=device, dtype=torch.float64, kind=kind)
    check_normalized(inputs, backend="reference", **options)


def test_several_terms(device):
    inputs, options = made_of(device=device, kind="all, classes")
    check_normalized(inputs, loss_of=in_terms(cross_entropy, (8, 11)), **options)


@pytest.mark.parametrize("dtype", HALVES)
def test_autocast(device, dtype):
    """A normaliser of the input's dtype is not rounded to autocast's."""
    inputs, _ = made_of(device=device, dtype=dtype, bias=True)
    count = torch.tensor(257.0, device=device)  # bfloat16 has no such number
    with torch.autocast(device, dtype):
        found = differentiate(fused, inputs.to(torch.float32), normalizer=count)
    expected = differentiate(fused, inputs.to(torch.float32), reduction="sum")
    with torch.autocast(device, dtype):
        expected = differentiate(fused, inputs.to(torch.float32), 1 / 257, reduction="sum")
    torch.testing.assert_close(found["loss"], expected["loss"] / 257, rtol=1e-6, atol=0)
    assert found["input"].dtype == torch.float32


# Values and kinds of a normaliser.


def test_zero_beside_tokens(device):
    """A total over 0 is NaN, and its gradient 0, in the losses that divide by themselves."""
    hidden = torch.randn(5, 3, device=device, requires_grad=True)
    head = torch.nn.Linear(3, 7, device=device)
    target = torch.arange(5, device=device)
    count, sum_loss = torch.tensor(0, device=device), torch.nn.CrossEntropyLoss(reduction="sum")
    for loss in (
        lowtide.chunked_loss(sum_loss, head, hidden, target, normalizer=count),
        lowtide.losses.z_loss(hidden, head.weight, target, normalizer=count),
    ):
        assert loss.isnan()
        for gradient in torch.autograd.grad(loss, [hidden, head.weight]):
            assert not gradient.any()


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["plain", *ALL])
def test_own_count_gives_the_bits_of_a_mean(device, kind, dtype, backend):
    inputs, options = made_of(device=device, dtype=dtype, kind=kind)
    counted = inputs.target != -100
    if inputs.probabilities:
        count = torch.tensor(len(inputs.target), device=device)
    elif inputs.weight is not None:
        weight = inputs.weight.to(inputs.sum_dtype)[inputs.target.clamp(min=0)]
        count = weight.masked_fill(~counted, 0)
        kept = device == "cpu" and backend == "auto"  # whose engine leaves ignored rows out of its sum
        count = (count[counted] if kept else count).sum()
    else:
        count = counted.sum()
    mean = differentiate(fused, inputs, backend=backend, **options)
    given = differentiate(fused, inputs, backend=backend, normalizer=count, **options)
    for name, each in mean.items():
        assert torch.equal(each, given[name]), name


def test_numbers_and_tensors(device):
    """All of the same value give the same bits, in the dtypes that counts come in."""
    inputs, _ = made_of(device=device)
    expected = differentiate(fused, inputs, normalizer=9)
    tensors = [torch.tensor(9, dtype=dtype) for dtype in COUNT_DTYPES]
    for each in (9.0, *tensors, *(each.to(device) for each in tensors)):
        found = differentiate(fused, inputs, normalizer=each)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("number", [9, 9.0, *COUNT_DTYPES], ids=str)
def test_number_on_another_device(number):
    """One in the CPU's memory has the dtype of the sums, too, beside an input that is elsewhere."""
    number = torch.tensor(9, dtype=number) if isinstance(number, torch.dtype) else number
    for dtype, sum_dtype in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        found = number_beside(torch.empty(2, dtype=dtype, device="meta"), number)
        assert (found.shape, found.dtype, found.device.type) == ((), sum_dtype, "meta")


@pytest.mark.parametrize("probabilities", [False, True])
@pytest.mark.parametrize("normalizer", [None, 9, torch.tensor(9.0, dtype=torch.float64)], ids=str)
def test_sums_are_divided_by_a_tensor_beside_them(device, normalizer, probabilities):
    """CUDA multiplies by a number's reciprocal, and a tensor's on the CPU: other last bits."""
    inputs, divisors = make_inputs(device=device, probabilities=probabilities), []

    class Divisors(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.overloadpacket in (torch.ops.aten.div, torch.ops.aten.div_):
                divisors.append(args[1])
            return function(*args, **kwargs or {})

    with Divisors():
        fused(inputs, normalizer=normalizer, backend="reference")
    assert divisors
    assert all(isinstance(each, torch.Tensor) and each.device.type == device for each in divisors)


def test_number_not_read_while_traced(device):
    """A graph of make_fx divides by the normaliser that it is given."""
    inputs = make_inputs(device=device)
    target = inputs.target

    def loss(input, weight, normalizer):
        return lowtide.linear_cross_entropy(input, weight, target, normalizer=normalizer)

    leaves = inputs.input.detach(), inputs.linear_weight.detach()
    graph = make_fx(loss)(*leaves, torch.tensor(9.0))
    exact = F.cross_entropy(leaves[0] @ leaves[1].t(), target, reduction="sum") / 5
    torch.testing.assert_close(graph(*leaves, torch.tensor(5.0)), exact, rtol=1e-5, atol=0)


def test_waits_for_nothing(device):
    inputs, count = make_inputs(device=device), torch.tensor(9, device=device)
    for each in (count, 9, torch.tensor(9)):
        with no_synchronisation(device):
            fused(inputs, normalizer=each).backward()


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("positions", [(), (2,)])
def test_rank_whose_rows_are_all_ignored(device, positions, backend):
    """Nothing of its own, where others have tokens; and NaN without gradients, where nobody has."""
    call = make_call(positions, device=device)
    call["target"].fill_(-100)
    leaves = [call[name].requires_grad_() for name in ("input", "linear_weight")]
    for count, expected in ((7.0, 0.0), (torch.tensor(0, device=device), torch.nan)):
        loss = lowtide.linear_cross_entropy(*leaves, call["target"], normalizer=count, backend=backend)
        torch.testing.assert_close(loss.item(), expected, equal_nan=True, rtol=0, atol=0)
        for gradient in torch.autograd.grad(loss, leaves):
            assert not gradient.any()


@pytest.mark.parametrize("sizes", [{"rows": 0}, {"classes": 0, "probabilities": True}], ids=str)
@pytest.mark.parametrize("positions", [(), (2,), (0,)])
def test_nothing(device, positions, sizes):
    """The sum of nothing, divided: 0, not the NaN of a mean over nothing."""
    call = make_call(positions, device=device, **sizes)
    loss = lowtide.linear_cross_entropy(call["input"], call["linear_weight"], call["target"], normalizer=3)
    assert loss.item() == 0


@pytest.mark.parametrize("probabilities", [False, True])
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("positions", [(1,), (3,), (2, 2)])
def test_positions(device, positions, backend, probabilities):
    made = {"bias": True, "class_weight": True, "probabilities": probabilities}
    call = make_call(positions, device=device, ignored=None if probabilities else -100, **made)
    options = {"label_smoothing": 0.1, "weight": call["weight"], "linear_bias": call["linear_bias"]}
    leaves = [call[name].requires_grad_() for name in ("input", "linear_weight")]
    total = lowtide.linear_cross_entropy(*leaves, call["target"], reduction="sum", **options)
    found = lowtide.linear_cross_entropy(
        *leaves, call["target"], normalizer=COUNT, backend=backend, **options
    )
    ours, theirs = ((each, *torch.autograd.grad(each, leaves)) for each in (found, total / COUNT))
    for one, other in zip(ours, theirs):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def test_float16_gradients_keep_their_range(device):
    """One of 2^-26 is no float16; a loss scale brings it back, also behind a large normaliser."""
    inputs = make_inputs(device=device, dtype=torch.float16)
    count, scale = 2.0**20, 2.0**20
    found = differentiate(fused, inputs, scale, normalizer=count)
    expected = differentiate(fused, inputs, reduction="sum")
    assert torch.equal(found["linear_weight"], expected["linear_weight"])


def test_products(device):
    inputs = make_inputs(37, 19, 63, device=device)
    with FlopCounterMode(display=False) as counter:
        fused(inputs, normalizer=COUNT).backward()
    assert counter.get_total_flops() == 3 * 2 * 37 * 19 * 63


def test_module(device):
    torch.manual_seed(0)
    criterion = lowtide.LinearCrossEntropyLoss(8, 21, device=device)
    x, target = torch.randn(6, 8, device=device), torch.randint(21, (6,), device=device)
    torch.testing.assert_close(criterion(x, target, normalizer=12) * 2, criterion(x, target))


def test_z_loss_of_losses(device):
    x, w = torch.randn(6, 8, device=device), torch.randn(21, 8, device=device)
    target = torch.randint(21, (6,), device=device)
    mean = lowtide.losses.z_loss(x, w, target)
    torch.testing.assert_close(lowtide.losses.z_loss(x, w, target, normalizer=12) * 2, mean)
    for refused in (0, torch.tensor(-12.0)):
        with pytest.raises(ValueError, match="above 0"):
            lowtide.losses.z_loss(x, w, target, normalizer=refused)


# Derivatives and transforms.


@pytest.mark.parametrize("kind", kinds.KINDS)
def test_derivatives_first_and_second_order(device, kind):
    inputs, options = kinds.small(device, kind)
    loss, values = kinds.loss_of_leaves(inputs, normalizer=COUNT, **options)
    leaves = tuple(value.requires_grad_() for value in values)
    assert torch.autograd.gradcheck(loss, leaves, fast_mode=True, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(loss, leaves, fast_mode=True)


@pytest.mark.parametrize("kind", kinds.KINDS)
@pytest.mark.parametrize("transform", ["grad", "jvp", "hessian", "create_graph"])
def test_transforms(device, transform, kind):
    inputs, options = kinds.small(device, kind)

    def transformed(loss, values):
        places = tuple(range(len(values)))
        if transform == "jvp":
            return torch.func.jvp(loss, values, tuple(value.cos() for value in values))
        if transform == "create_graph":
            leaves = [value.requires_grad_() for value in values]
            first = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
            return torch.autograd.grad(sum(each.square().sum() for each in first), leaves)
        if transform == "grad":
            return torch.func.grad(loss, places)(*values)
        return [block for row in torch.func.hessian(loss, (0, 1))(*values) for block in row]

    ours, values = kinds.loss_of_leaves(inputs, normalizer=COUNT, **options)
    truth, _ = kinds.loss_of_leaves(inputs, dense, normalizer=COUNT, **options)
    kinds.assert_close(transformed(ours, values), transformed(truth, values))


@pytest.mark.parametrize("positions", [(), (2,)])
def test_vmap_over_normalizers(device, positions):
    call = make_call(positions, device=device, ignored=-100)
    x, w, target = call["input"], call["linear_weight"], call["target"]
    counts = torch.tensor([3.0, 5.0, 7.5], dtype=torch.float64, device=device)

    def loss(x, normalizer):
        return lowtide.linear_cross_entropy(x, w, target, normalizer=normalizer)

    found = torch.vmap(torch.func.grad_and_value(loss), (None, 0))(x, counts)
    for k, count in enumerate(counts):
        leaf = x.detach().requires_grad_()
        value = lowtide.linear_cross_entropy(leaf, w, target, reduction="sum") / count
        (gradient,) = torch.autograd.grad(value, leaf)
        kinds.assert_close([each[k] for each in found], [gradient, value])


def test_checkpointing(device):
    inputs = make_inputs(device=device)
    expected = differentiate(fused, inputs, normalizer=9)
    names = list(inputs.leaves())

    def loss(*leaves):
        return fused(replace(inputs, **dict(zip(names, leaves))), normalizer=9)

    leaves = inputs.leaves().values()
    value = checkpoint(loss, *leaves, use_reentrant=False)
    for name, each in zip(names, torch.autograd.grad(value, list(leaves))):
        assert torch.equal(each, expected[name]), name


@pytest.mark.parametrize("positions", [False, True])
def test_opcheck(device, positions):
    call = make_call((3,) if positions else (), device=device)
    count = torch.tensor(7.0, dtype=torch.float64, device=device)
    head = [[call["input"]], [call["linear_weight"]], None, None, call["target"], None, None, count]
    options = Options(compute_dtype=torch.float64)
    arguments = with_new_graph_facts(
        "lowtide::linear_cross_entropy", (*head, (True, True, False, False), *options)
    )
    torch.library.opcheck(torch.ops.lowtide.linear_cross_entropy.default, arguments)


def test_compiled(device):
    """One graph serves every count: tensors, floats, integers have one each, besides the first."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    step = torch.compile(
        lambda *leaves, normalizer: loss(*leaves, normalizer), backend=backend, fullgraph=True
    )
    inputs = make_inputs(device=device)

    def loss(x, w, normalizer):
        return fused(replace(inputs, input=x, linear_weight=w), normalizer=normalizer)

    leaves = list(inputs.leaves().values())
    for counts in (
        [3, 5, 7, 9],
        [2.5, 3.5, 4.5, 5.5],
        [torch.tensor(each, device=device) for each in (3, 5, 7)],
    ):
        graphs.clear()
        for count in counts:
            found, expected = step(*leaves, normalizer=count), loss(*leaves, count)
            assert torch.equal(found, expected)
            for one, other in zip(*(torch.autograd.grad(each, leaves) for each in (found, expected))):
                assert torch.equal(one, other)
        assert len(graphs) <= 2


# Errors.

t, x, w = torch.arange(4), torch.randn(4, 3), torch.randn(5, 3)


@pytest.mark.parametrize(
    ("changed", "kind", "message"),
    [
        ({"reduction": "sum"}, ValueError, "normalizer is what reduction='mean' divides the sum by"),
        ({"reduction": "none"}, ValueError, "leave normalizer out and divide the result"),
        ({"normalizer": 0}, ValueError, "normalizer must be a finite number above 0, got 0"),
        (
            {"normalizer": -3.0},
            ValueError,
            "normalizer must be a finite number above 0, got -3.0; "
            "pass lowtide.tokens_per_rank(target), or leave it out",
        ),
        ({"normalizer": float("nan")}, ValueError, "normalizer must be a finite number above 0, got nan"),
        ({"normalizer": float("inf")}, ValueError, "normalizer must be a finite number above 0, got inf"),
        ({"normalizer": 1 << 2000}, ValueError, "normalizer must be a number that a float can hold"),
        ({"normalizer": True}, TypeError, "normalizer must be a float, got True"),
        ({"normalizer": "3"}, TypeError, "normalizer must be a float, got '3'"),
        ({"normalizer": torch.ones(2)}, ValueError, "a 0-d tensor of one, got torch.float32 of shape [2]"),
        ({"normalizer": torch.tensor(True)}, ValueError, "a 0-d tensor of one, got torch.bool"),
        ({"normalizer": torch.tensor(1j)}, ValueError, "a 0-d tensor of one, got torch.complex64"),
        ({"normalizer": torch.tensor(1.0, device="meta")}, ValueError, "must be on input's device (cpu)"),
        ({"normalizer": torch.tensor(1.0, requires_grad=True)}, ValueError, "pass normalizer.detach()"),
        (
            {"normalizer": torch.tensor(-3.0)},
            ValueError,
            "a finite number above 0, or 0 for no token, got -3.0; pass lowtide.tokens_per_rank(target), or",
        ),
        ({"normalizer": torch.tensor(-3)}, ValueError, "a finite number above 0, or 0 for no token, got -3"),
        ({"normalizer": torch.tensor(torch.nan)}, ValueError, "above 0, or 0 for no token, got nan"),
        ({"normalizer": torch.tensor(torch.inf)}, ValueError, "above 0, or 0 for no token, got inf"),
    ],
    ids=str,
)
def test_errors(changed, kind, message):
    for weight, target in ((w, t), (w[:, None].expand(5, 2, 3), t[:, None].expand(4, 2))):
        with pytest.raises(kind, match=re.escape(message)):
            lowtide.linear_cross_entropy(x, weight, target, **{"normalizer": 3} | changed)
