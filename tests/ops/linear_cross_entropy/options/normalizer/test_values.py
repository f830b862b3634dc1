"""What a normaliser does: numbers and tensors of any dtype, nothing to divide, K dimensions; and in
the module and in lowtide.losses.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import lowtide
from lowtide.ops.linear_cross_entropy.definition.head import number_beside
from tests.ops.linear_cross_entropy.calls import make_call
from tests.ops.linear_cross_entropy.options.helpers import ALL, WARNINGS, made_of
from tests.ops.linear_cross_entropy.options.normalizer.helpers import COUNT
from tests.ops.linear_cross_entropy.options.test_options import DTYPES
from tests.support.loss import differentiate, fused, make_inputs, no_synchronisation

pytestmark = WARNINGS
COUNT_DTYPES = (torch.int64, torch.int32, torch.float64, torch.half)


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
