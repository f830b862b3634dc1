"""Replaces torch.nn.functional.linear_cross_entropy (torch 2.13, without `options`) in edge cases,
where there is nothing to add up, or where numbers are infinite or NaN.

Shapes: N rows, D features, V classes, d1 ... dK positions.
"""

import itertools
import math

import numpy as np
import pytest
import torch

import lowtide
from tests.ops.linear_cross_entropy.calls import REDUCTIONS, N, check_same, check_same_or_error, make_call


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("class_weight", [False, True])
@pytest.mark.parametrize("positions", [(), (3,)])
def test_no_valid_rows(device, positions, class_weight, reduction):
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
    """The mean of rows whose weights are all 0 is 0 / 0."""
    arguments = make_call(device=device, class_weight=True)
    for zeros in (slice(0, 2), slice(None)):
        weight = arguments["weight"].clone()
        weight[zeros] = 0
        for smoothing in (0.0, 0.1):
            check_same(arguments | {"weight": weight}, reduction=reduction, label_smoothing=smoothing)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("probabilities", [False, True])
def test_one_class(device, probabilities, reduction):
    """A target of one number is a class or a probability by its dtype: one class, one row."""
    for rows in (1, N):
        arguments = make_call(device=device, rows=rows, class_weight=True)
        arguments["linear_weight"] = arguments["linear_weight"][:1]
        arguments["weight"] = arguments["weight"][:1]
        target = torch.rand(rows, 1, dtype=torch.float64) if probabilities else torch.zeros(rows).long()
        check_same(arguments | {"target": target.to(device)}, reduction=reduction)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", ["classes", "all ignored", "probabilities"])
@pytest.mark.parametrize("positions", [(), (2,), (0,), (2, 0)])
def test_no_valid_rows_and_no_features(device, positions, kind, reduction):
    """Without rows, classes, features or positions, or several, both give one value or error."""
    for rows, classes, features in itertools.product((0, 3, None), (0, 4), (0, 2)):
        if rows is None and positions:
            continue
        for extras, smoothing in itertools.product((False, True), (0.0, 0.1)):
            arguments = make_call(
                positions,
                device=device,
                batched=rows is not None,
                rows=rows,
                classes=classes,
                features=features,
                probabilities=kind == "probabilities",
                bias=extras,
                class_weight=extras,
            )
            if kind == "all ignored":
                arguments["target"] = torch.full_like(arguments["target"], -100)
            if device == "cuda" and kind == "classes" and classes == 0:
                continue  # this call stops torch's kernel, and the device with it
            check_same_or_error(arguments, reduction=reduction, label_smoothing=smoothing)


@pytest.mark.parametrize("smoothing", [-0.1, -1, -math.inf, math.nan])
@pytest.mark.parametrize("probabilities", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_label_smoothing_not_positive(device, reduction, probabilities, smoothing):
    """A label smoothing that is not above 0, or is NaN, counts as none."""
    for class_weight in (False, True):
        arguments = make_call(device=device, probabilities=probabilities, class_weight=class_weight)
        check_same(arguments, reduction=reduction, label_smoothing=smoothing)


SMOOTHINGS = [
    *(0, 1, True, False, np.float64(0.1), np.float32(0.1), np.float16(0.1), np.int64(1), np.int32(0)),
    *(np.True_, np.False_, torch.tensor(0.1), torch.tensor(0.1).double(), torch.tensor(1)),
    torch.tensor(True),
]  # fmt: skip
INDICES = [
    *(np.int64(2), np.int32(2), np.int8(-100), np.uint64(3), np.array(2), torch.tensor(2), torch.tensor([2])),
    torch.tensor(2).byte(),
]  # fmt: skip


@pytest.mark.parametrize("smoothing", SMOOTHINGS, ids=lambda number: f"{type(number).__name__} {number}")
def test_label_smoothing_any_number(smoothing):
    for probabilities, positions in itertools.product((False, True), ((), (2,))):
        check_same(make_call(positions, probabilities=probabilities), label_smoothing=smoothing)


@pytest.mark.parametrize("index", INDICES, ids=lambda number: f"{type(number).__name__} {number}")
def test_ignore_index_any_number(index):
    for positions in ((), (2,)):
        check_same(make_call(positions, ignored=int(index)), ignore_index=index)


def test_own_options_any_number():
    """Options that torch lacks take any kind of number, as Python's own float does."""
    arguments = make_call()
    own = {"softcap": 2, "z_loss": 0.5, "logit_scale": 0.5, "workspace": 1 << 20}
    expected = lowtide.linear_cross_entropy(**arguments, **own)
    kinds = {"softcap": np.int64, "z_loss": np.float32, "logit_scale": np.float16, "workspace": np.int64}
    options = {name: kinds[name](value) for name, value in own.items()}
    assert torch.equal(lowtide.linear_cross_entropy(**arguments, **options), expected)


def test_no_features(device):
    for reduction in REDUCTIONS:
        check_same(make_call(device=device, features=0, bias=True), reduction=reduction)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("probabilities", [False, True])
def test_nonfinite(device, probabilities, value):
    for name, reduction in itertools.product(("input", "linear_weight", "linear_bias"), REDUCTIONS):
        arguments = make_call(device=device, bias=True, probabilities=probabilities)
        arguments[name] = arguments[name].clone()
        arguments[name].view(-1)[1] = value
        check_same(arguments, reduction=reduction)
