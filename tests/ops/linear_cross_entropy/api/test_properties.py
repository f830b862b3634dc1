"""Any call: shapes, dtypes, options, workspaces at random, against float64, within the budget."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lowtide.ops.linear_cross_entropy.dispatch import cross_entropy
from tests.support.loss import (
    HALVES,
    check,
    check_log_probs,
    differentiate,
    differentiate_log_probs,
    fused,
    fused_log_probs,
    make_inputs,
    norm,
    smallest_workspace,
)

DTYPES = (torch.float32, torch.float64, *HALVES)

# The same draws every time; hypothesis itself would seed torch, which conftest.py does.
SETTINGS = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))

SIZES = st.tuples(st.integers(0, 70), st.integers(1, 20), st.integers(1, 70))
LEADING = st.sampled_from([(), (1,), (5,), (2, 3), (3, 1, 2), (0,), (2, 0)])
ROOM = st.none() | st.integers(0, 60_000)
LOSS = st.fixed_dictionaries(
    {
        "reduction": st.sampled_from(["mean", "sum", "none"]),
        "label_smoothing": st.sampled_from([0.0, 0.1, 1.0]),
        "softcap": st.sampled_from([None, 0.5, 30.0]),
        "z_loss": st.sampled_from([0.0, 1e-4, 0.5]),
        "logit_scale": st.sampled_from([None, 0.3, -2.0]),
    }
)
MADE = st.fixed_dictionaries(
    {
        "bias": st.booleans(),
        "class_weight": st.booleans(),
        "probabilities": st.booleans(),
        "logit_scale": st.booleans(),
        "ignored": st.sampled_from([0.0, 0.5, 1.0]),
        "dtype": st.sampled_from(DTYPES),
    }
)


def workspace_with(room, call):
    """`room` bytes more than the least; None for the default."""
    return None if room is None else smallest_workspace(call) + room


@SETTINGS
@given(sizes=SIZES, made=MADE, options=LOSS, room=ROOM, upstream=st.sampled_from([1.0, -0.5, 2.0**13]))
def test_any_loss(device, sizes, made, options, room, upstream):
    torch.manual_seed(0)
    inputs = make_inputs(*sizes, device=device, **made)
    if made["logit_scale"]:
        options = options | {"logit_scale": None}
    workspace = workspace_with(room, lambda workspace: fused(inputs, workspace=workspace, **options))
    found = differentiate(fused, inputs, upstream, workspace=workspace, **options)
    counted = inputs.probabilities or bool((inputs.target >= 0).any())
    if not counted and options["reduction"] == "mean":
        assert found.pop("loss").isnan()
        for name, gradient in found.items():
            assert gradient.eq(0).all(), name
    else:
        check(found, inputs, upstream=upstream, **options)


@SETTINGS
@given(
    sizes=SIZES,
    bias=st.booleans(),
    learned=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    ignored=st.sampled_from([0.0, 0.5, 1.0]),
    softcap=st.sampled_from([None, 0.5, 30.0]),
    used=st.tuples(st.booleans(), st.booleans(), st.booleans()).filter(any),
    room=ROOM,
)
def test_any_log_probs(device, sizes, bias, learned, dtype, ignored, softcap, used, room):
    torch.manual_seed(0)
    inputs = make_inputs(*sizes, device=device, dtype=dtype, bias=bias, logit_scale=learned, ignored=ignored)
    upstream = [torch.randn(sizes[0], device=device) if each else None for each in used]
    workspace = workspace_with(
        room, lambda workspace: fused_log_probs(inputs, softcap=softcap, workspace=workspace)
    )
    found = differentiate_log_probs(fused_log_probs, inputs, upstream, softcap=softcap, workspace=workspace)
    check_log_probs(found, inputs, upstream, softcap=softcap)


@SETTINGS
@given(sizes=SIZES, made=MADE, options=LOSS, cuts=st.lists(st.integers(0, 20), max_size=3))
def test_any_number_of_terms(device, sizes, made, options, cuts):
    torch.manual_seed(0)
    N, D, V = sizes
    inputs = make_inputs(N, D, V, device=device, **made | {"ignored": 0.0})
    ends = sorted({min(cut, D) for cut in cuts} - {0} | {D})
    widths = [end - start for start, end in zip([0, *ends], ends)]
    scale = inputs.logit_scale if made["logit_scale"] else options["logit_scale"]

    def loss_of(inputs, **_):
        return cross_entropy(
            inputs.input.split(widths, 1),
            inputs.linear_weight.split(widths, 1),
            inputs.target,
            linear_bias=inputs.linear_bias,
            weight=inputs.weight,
            **options | {"logit_scale": scale},
        )

    if N or options["reduction"] != "mean":
        check(differentiate(loss_of, inputs), inputs, **options)


@SETTINGS
@given(
    leading=LEADING,
    probabilities=st.booleans(),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    options=st.sampled_from([{}, {"softcap": 1.5, "z_loss": 0.1, "label_smoothing": 0.1}]),
)
def test_leading_dimensions_are_rows(device, leading, probabilities, reduction, options):
    """The same bits as for [N, D], in another shape."""
    torch.manual_seed(0)
    N = torch.Size(leading).numel()
    flat = make_inputs(N, 5, 7, device=device, bias=True, probabilities=probabilities)
    expected = differentiate(fused, flat, 0.3, reduction=reduction, **options)
    shape = (*leading, 7) if probabilities else leading
    shaped = type(flat)(
        flat.input.detach().view(*leading, 5).requires_grad_(),
        flat.linear_weight,
        flat.target.view(shape),
        flat.linear_bias,
    )
    found = differentiate(fused, shaped, 0.3, reduction=reduction, **options)
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name].flatten(), tensor.flatten(), rtol=0, atol=0, equal_nan=True, msg=name
        )


@SETTINGS
@given(made=MADE, options=LOSS, rooms=st.tuples(st.integers(0, 5_000), st.integers(0, 60_000)))
def test_result_independent_of_workspace(device, made, options, rooms):
    """Each row's sums are its own, so the losses of rows agree to a rounding of each."""
    torch.manual_seed(0)
    inputs = make_inputs(device=device, **made)
    options = options | {"reduction": "none"}
    if made["logit_scale"]:
        options = options | {"logit_scale": None}
    least = smallest_workspace(lambda workspace: fused(inputs, workspace=workspace, **options))
    losses = [fused(inputs, workspace=least + room, **options).detach() for room in rooms]
    assert norm(losses[0] - losses[1]) <= 8 * torch.finfo(losses[0].dtype).eps * norm(losses[0])


@SETTINGS
@given(sizes=SIZES, made=MADE, options=LOSS, factor=st.sampled_from([2.0, -1.0, 2.0**-7]))
def test_gradients_linear_in_upstream(device, sizes, made, options, factor):
    """A power of two goes through every product and sum without a rounding."""
    torch.manual_seed(0)
    # In float16 it may leave the range.
    dtype = torch.float32 if made["dtype"] == torch.float16 else made["dtype"]
    inputs = make_inputs(*sizes, device=device, **made | {"dtype": dtype, "logit_scale": False})
    once = differentiate(fused, inputs, 1.0, **options)
    scaled = differentiate(fused, inputs, factor, **options)
    for name in inputs.leaves():
        torch.testing.assert_close(scaled[name], factor * once[name], rtol=0, atol=1e-37, msg=name)


@SETTINGS
@given(
    sizes=SIZES,
    shift=st.sampled_from([-64.0, 3.0, 1000.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_result_independent_of_logit_shift(device, sizes, shift, dtype):
    torch.manual_seed(0)
    inputs = make_inputs(*sizes, device=device, dtype=dtype, bias=True, ignored=0.0)
    shifted = type(inputs)(
        inputs.input,
        inputs.linear_weight,
        inputs.target,
        (inputs.linear_bias.detach() + shift).requires_grad_(),
    )
    plain, other = (fused(each, reduction="none").detach() for each in (inputs, shifted))
    rounding = 4 * torch.finfo(dtype).eps * (abs(shift) + 20)
    assert (plain - other).abs().max().item() <= rounding if plain.numel() else True


# Beyond the range of 32-bit offsets.


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_more_logits_than_int32(reduction, backend):
    """N V is 2^31 and more in one chunk: the last rows, with offsets beyond int32, are as alone."""
    N, D, V = (1 << 14) + 128, 16, 1 << 17
    if torch.cuda.mem_get_info()[0] < 5 * N * V:
        pytest.skip("needs 12 GiB")
    inputs = make_inputs(N, D, V, device="cuda", dtype=torch.bfloat16, ignored=0.0, scale=1.0)
    last = slice(N - 128, None)
    alone = type(inputs)(
        inputs.input.detach()[last].clone().requires_grad_(), inputs.linear_weight, inputs.target[last]
    )
    options = {"reduction": reduction, "backend": backend}
    whole = differentiate(fused, inputs, workspace=5 * N * V, **options)
    part = differentiate(fused, alone, **options)
    share = 128 / N if reduction == "mean" else 1.0
    tail = whole["input"][last].float() / share
    assert norm(tail - part["input"].float()) <= 1e-2 * norm(part["input"].float())
    if reduction == "none":
        torch.testing.assert_close(whole["loss"][last], part["loss"], rtol=1e-5, atol=1e-5)
    assert whole["linear_weight"].isfinite().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_weight_larger_than_int32():
    """V D beyond 2^31: offsets into the weight and its gradient."""
    N, D, V = 64, 4096, (1 << 19) + 64
    if torch.cuda.mem_get_info()[0] < 20 * D * V:
        pytest.skip("needs 43 GiB")
    x = torch.randn(N, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(V, D, device="cuda", dtype=torch.bfloat16).mul_(D**-0.5).requires_grad_()
    target = torch.arange(V - N, V, device="cuda")
    inputs = type(make_inputs(1, 1, 1))(x, w, target)
    found = differentiate(fused, inputs, reduction="sum")
    logits_NV = torch.mm(x, w.t(), out_dtype=torch.float32)
    expected = torch.nn.functional.cross_entropy(logits_NV, target, reduction="sum")
    torch.testing.assert_close(found["loss"], expected, rtol=1e-4, atol=0)
    pull_NV = logits_NV[:, -N:].sub(logits_NV.logsumexp(1, keepdim=True)).exp() - torch.eye(N, device="cuda")
    want = pull_NV.t() @ x.float()
    assert norm(found["linear_weight"][-N:].float() - want) <= 1e-2 * norm(want)
