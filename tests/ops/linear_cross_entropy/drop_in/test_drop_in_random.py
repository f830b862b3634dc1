"""In the place of torch.nn.functional.linear_cross_entropy (torch 2.13, without `options`): any
call at all, of any shapes, dtypes and options, good or bad. Both raise, and alike, or both give the
same.

What differs is said: half precision has a float32 loss, and is summed in float32 as torch's own
call on widened tensors; class weights beside indices may have any dtype; bytes are classes wherever
int64 is; and a target [1] of an input [D] is a class, with a smoothing and with gradients as well.

Shapes: N rows, D features, V classes, d1 ... dK positions.
"""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lowtide
from tests.ops.linear_cross_entropy.calls import (
    NAMES,
    REDUCTIONS,
    check_error,
    needs_torchs_own,
    outcome,
    theirs,
)

pytestmark = needs_torchs_own

EXAMPLES = settings(
    max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
HALVES = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, torch.float64, *HALVES)
WRONG = (torch.int16, torch.bool)
SMOOTHINGS = (0.0, 0.0, 0.1, 1, 1.0, -0.5, True, float("nan"))
INDICES = (None, None, -100, 0, 2, 255, -1, 2**63 - 1)
# At most one thing is wrong at a time: with two, either may be found first.
FAULTS = (None, None, None, "tensor", "class", "option")
BAD_OPTIONS = (
    *(("reduction", bad) for bad in ("avg", None, "")),
    *(("label_smoothing", bad) for bad in (1.5, float("inf"), "0.1", None, [0.1], 1j)),
    *(("ignore_index", bad) for bad in (2**63, -(2**63) - 1, 1.0, True, "1", [1])),
)


@st.composite
def calls(draw):
    """What is passed, and with what options."""
    fault = draw(st.sampled_from(FAULTS))
    positions = draw(st.sampled_from([(), (), (), (2,), (1, 2), (2, 1, 1), (0,)]))
    leading = draw(st.sampled_from([(4,), (3,), (1,), (0,), ()]))
    classes = draw(st.sampled_from([4, 3, 2, 1] if fault in ("tensor", "option") else [4, 3, 2, 1, 0]))
    features = draw(st.sampled_from([3, 1, 0]))
    dtype = draw(st.sampled_from(FLOATS))
    torch.manual_seed(draw(st.integers(0, 99)))
    options = {
        "reduction": draw(st.sampled_from(REDUCTIONS)),
        "label_smoothing": draw(st.sampled_from(SMOOTHINGS)),
    }

    def other(dtype):
        return draw(st.sampled_from([dtype, dtype, dtype, dtype, *FLOATS]))

    if draw(st.booleans()):
        target = torch.rand(*leading, classes, *positions).to(other(dtype))
    else:
        target = torch.randint(max(classes, 1), (*leading, *positions))
        index = options["ignore_index"] = draw(st.sampled_from(INDICES))
        ignored = -100 if index is None else index
        if fault == "class":
            ignored = draw(st.sampled_from([-100, -1, classes]))
        target = target.where(torch.rand(target.shape) < 0.6, ignored)
        target = target.byte() if 0 <= ignored < 256 and draw(st.booleans()) else target
    arguments = {
        "input": torch.randn(*leading, features).to(dtype),
        "linear_weight": torch.randn(classes, *positions, features).to(dtype),
        "target": target,
        "linear_bias": torch.randn(classes, *positions).to(dtype) if draw(st.booleans()) else None,
        "weight": torch.rand(classes).to(other(dtype)) if draw(st.booleans()) else None,
    }
    name = draw(st.sampled_from(NAMES))
    if fault == "tensor" and arguments[name] is not None:
        arguments[name] = spoiled(draw, arguments[name])
    if fault == "option":
        options |= [draw(st.sampled_from(BAD_OPTIONS))]
    return arguments, options


def spoiled(draw, tensor):
    """Of another shape, or another dtype; some are as good as before."""
    way = draw(
        st.sampled_from(["a dimension more", "one less", "longer", "shorter", "turned", "dtype", "wrong"])
    )
    if way == "dtype":
        return tensor.to(draw(st.sampled_from(FLOATS)))
    if way == "wrong":
        return tensor.to(draw(st.sampled_from(WRONG)))
    if way == "turned":
        return tensor.movedim(0, -1) if tensor.dim() else tensor
    if way == "a dimension more":
        return tensor.unsqueeze(draw(st.sampled_from([0, -1])))
    if tensor.dim() == 0:
        return tensor
    dim = draw(st.integers(0, tensor.dim() - 1))
    if way == "longer":
        return torch.cat([tensor, tensor.narrow(dim, 0, min(1, tensor.shape[dim]))], dim)
    size = tensor.shape[dim]
    return tensor.narrow(dim, 0, max(size - 1, 0)) if way == "shorter" or not size else tensor.select(dim, 0)


def extended(arguments):
    """Whether this is one of the calls that torch refuses, and we take."""
    input, target, weight = (arguments[name] for name in ("input", "target", "weight"))
    leading = input.dim() > 2
    weights = weight is not None and weight.dtype != input.dtype and not target.is_floating_point()
    # torch does not take such a target with label smoothing.
    one = input.dim() == 1 and target.shape == (1,) and arguments["linear_weight"].shape[0] > 1
    return leading or weights or one or target.dtype == torch.uint8


def widened(arguments):
    """Half precision as float32, in which it is summed; torch smooths them in their own."""
    return {
        name: tensor.float() if tensor is not None and tensor.dtype in HALVES else tensor
        for name, tensor in arguments.items()
    }


@EXAMPLES
@given(call=calls())
def test_any_call(call):
    arguments, options = call
    names = ["input", "linear_weight", "linear_bias"]
    if arguments["target"].is_floating_point():
        weight = arguments["weight"]
        names += ["target"] + ["weight"] * (weight is not None and weight.is_floating_point())
    try:
        theirs(**arguments, **options)
    except Exception as error:
        if not extended(arguments):
            check_error(error, arguments | options)
        return
    wide = widened(arguments)
    loss, found = theirs(**wide, **options), lowtide.linear_cross_entropy(**arguments, **options)
    summed = max((t.dtype for t in wide.values() if t is not None and t.is_floating_point()), key=eps_of)
    check_close("loss", found, loss, loss.dtype, summed)
    try:
        expected = outcome(theirs, wide, names, **options)
    except RuntimeError:  # torch's forward takes the arguments, and its backward does not
        target = arguments["target"]
        assert target.shape == (1,) or target.dtype == torch.uint8
        return
    found = outcome(lowtide.linear_cross_entropy, arguments, names, **options)
    for name, tensor in expected.items():
        check_close(
            name, found[name], tensor, found[name].dtype if name == "loss" else arguments[name].dtype, summed
        )


def eps_of(dtype):
    return torch.finfo(dtype).eps


def check_close(name, found, expected, dtype, summed):
    """A few roundings to what it was summed in, and two to its own dtype."""
    assert found.dtype == dtype, name
    eps = 100 * eps_of(summed) + 2 * eps_of(dtype)
    torch.testing.assert_close(found.to(expected.dtype), expected, rtol=eps, atol=eps, equal_nan=True)
