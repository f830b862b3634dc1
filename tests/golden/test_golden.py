"""The golden set itself: that it repeats, and that it notices."""

import copy

import pytest
import torch

from tests.golden.record import describe_call, describe_outputs, differences

NAMES = ["loss, float32", "attention, a bias for each key"]


@pytest.fixture(scope="module")
def recorded():
    return {name: describe_call(name, "cpu") for name in NAMES}


def test_call_repeats_its_bits(recorded):
    assert not any("error" in call for call in recorded.values())
    assert differences(recorded, {name: describe_call(name, "cpu") for name in NAMES}) == []


@pytest.mark.parametrize(
    ("path", "planted"),
    [
        (("outputs", "out", "sha256"), "0" * 64),
        (("outputs", "grad key", "stride"), [1, 2, 3, 4]),
        (("outputs", "grad bias"), None),
        (("peak bytes",), 0),
        (("engines",), []),
    ],
)
def test_difference_found(recorded, path, planted):
    other = copy.deepcopy(recorded)
    *within, last = path
    place = other[NAMES[1]]
    for name in within:
        place = place[name]
    place[last] = planted
    (line,) = differences(recorded, other)
    assert line.startswith(f"{NAMES[1]}: {', '.join(path)} was ")


def test_call_failed_or_missing_is_a_difference(recorded):
    first, second = NAMES
    assert differences(recorded, {first: recorded[first]}) == [f"{second}: no longer in the table"]
    failed = recorded | {second: {"error": "ValueError: no"}}
    assert any("error was None, is ValueError: no" in line for line in differences(recorded, failed))


@pytest.mark.parametrize("number", [-0.0, float("nan")])
def test_bits_compared_not_numbers(number):
    same = torch.tensor([number, 1.0])
    assert describe_outputs({"out": same}) == describe_outputs({"out": same.clone()})
    assert describe_outputs({"out": same}) != describe_outputs({"out": torch.tensor([0.0, 1.0])})
