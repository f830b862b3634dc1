"""Any arguments at all: a result that is right, or an error that says what is wrong."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lowtide
from tests.support.loss import Inputs, dense, dense_log_probs

x, w, t = torch.randn(4, 3), torch.randn(7, 3), torch.tensor([0, 1, -100, 6])
V, p = torch.ones(7), torch.rand(4, 7)
w_K, t_K = torch.randn(7, 2, 3), torch.zeros(4, 2).long()

nan, inf = float("nan"), float("inf")
NUMBERS = [0, 0.0, 1, 0.5, 1.0, -0.1, 1.5, nan, inf, -inf, None, "0.1", True, 1j, torch.tensor(0.5), [0.5],
           np.float32(0.5), np.int64(1), np.True_]  # fmt: skip
TENSORS = {
    "input": [x.double(), x.bfloat16(), x[0], x[None], x[:0], x[:, :0], x[0, 0], x.long(), x + 0j,
              x.to("meta")],
    "linear_weight": [w.t(), w[0], w[:0], w[:1], w[:, :0], w.double(), w.half(), w.long(), w_K, w_K[:, :0],
                      w * nan],
    "target": [t.int(), t.abs().byte() % 7, t.short(), t.float(), t[:3], t[:0], t[0], t[None], t + 7, t > 0,
               p, p[0], p[:3], p.double(), p.long(), t_K, torch.rand(4, 7, 2), t.to("meta"),
               torch.zeros(4, 1)],
    "linear_bias": [V, V[:6], V[None], V.double(), V.bfloat16(), V.long(), torch.zeros(7, 2), V * inf],
    "weight": [V, V[:6], V[None], V.double(), V.bfloat16(), V.long(), V * 0, V.clone().requires_grad_()],
}  # fmt: skip
POOL = {name: [*tensors, None, [1.0], 3, "x"] for name, tensors in TENSORS.items()} | {
    "reduction": ["sum", "none", "avg", None, 1, ["mean"]],
    "ignore_index": [
        None,
        -100,
        3,
        2**63 - 1,
        -(2**63),
        2**63,
        -(2**64),
        1.0,
        True,
        "3",
        torch.tensor(3),
        np.int32(3),
        torch.tensor(3.0),
        torch.tensor(True),
    ],
    "label_smoothing": NUMBERS,
    "softcap": [*NUMBERS, 1e-30, 1e30],
    "logit_scale": [*NUMBERS, torch.ones(1), torch.tensor(2), torch.tensor(0.5).double(), V[0].to("meta")],
    "z_loss": NUMBERS,
    "workspace": [None, 0, -1, 20_000, 1 << 70, 1e6, True, "1"],
    "backend": ["torch", "reference", "cuda", None, 3, ["auto"]],
}
CHANGES = st.lists(
    st.sampled_from([(name, place) for name, values in POOL.items() for place in range(len(values))]),
    min_size=1,
    max_size=3,
)
FUZZ = settings(max_examples=1500, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
LOSS_ALONE = {"weight", "reduction", "label_smoothing", "z_loss"}


def _dense_arguments(arguments):
    options = dict(arguments)
    names = ("input", "linear_weight", "target", "linear_bias", "weight")
    tensors = {name: options.pop(name, None) for name in names}
    if isinstance(options.get("logit_scale"), torch.Tensor):
        tensors["logit_scale"] = options.pop("logit_scale")
    if options.get("ignore_index", 0) is None:
        options["ignore_index"] = -100
    return Inputs(**tensors), options


def _dtype(input, target, weight=None, **others):
    """Of the loss: as torch promotes a product, but float32 at least."""
    factors = [tensor for tensor in (target, weight) if target.is_floating_point() and tensor is not None]
    dtype = torch.promote_types(input.dtype, torch.float32)
    for factor in factors:
        dtype = torch.promote_types(dtype, factor.dtype)
    return dtype


@FUZZ
@given(changes=CHANGES)
def test_any_arguments(changes):
    changed = {name: POOL[name][place] for name, place in changes}
    arguments = {"input": x, "linear_weight": w, "target": t} | changed
    try:
        found = lowtide.linear_cross_entropy(**arguments)
    except (ValueError, TypeError, IndexError) as error:
        if isinstance(error, (RuntimeError, IndexError)):
            return
        raise
    assert found.dtype == _dtype(**arguments)
    if arguments["linear_weight"].dim() == 2:
        inputs, options = _dense_arguments(arguments)
        expected = dense(inputs, **options)
        torch.testing.assert_close(found.to(expected.dtype), expected, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.extended
@FUZZ
@given(changes=CHANGES)
def test_any_arguments_of_log_probs(changes):
    changed = {name: POOL[name][place] for name, place in changes if name not in LOSS_ALONE}
    arguments = {"input": x, "linear_weight": w, "target": t} | changed
    try:
        found = lowtide.linear_log_probs(**arguments)
    except (ValueError, TypeError, IndexError) as error:
        if isinstance(error, (RuntimeError, IndexError)):
            return
        raise
    inputs, options = _dense_arguments(arguments)
    for ours, expected in zip(found, dense_log_probs(inputs, **options)):
        # An infinite logit may make NaN where torch has an infinity.
        ours, expected = (part.where(part.isfinite(), nan) for part in (ours.double(), expected.double()))
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4, equal_nan=True)
