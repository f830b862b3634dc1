"""What the suite does to torch leaves its users as they are; and the cases of `make test`."""

from types import SimpleNamespace

import torch

from tests.support.extended import mark_extended


def test_device_context_and_poisoned_memory():
    """In a process that has not asked for the table of constructors, tests/conftest.py did."""
    with torch.device("meta"):
        assert torch.nn.Embedding(3, 3).weight.device.type == "meta"
        assert torch.empty(2).device.type == "meta"
    assert torch.empty(2).isnan().all()


def case(name, *values):
    marks = []
    spec = SimpleNamespace(_idlist=values)
    return SimpleNamespace(
        nodeid=f"{name}[{'-'.join(values)}]",
        callspec=spec,
        marks=marks,
        add_marker=marks.append,
        get_closest_marker=lambda mark: mark in marks or None,
    )


def test_extended_cases_leave_every_value():
    grid = [case("grid", a, b, c) for a in "abcdef" for b in "ghij" for c in "kl"]
    alone = [case("list", value) for value in "abc"]
    mark_extended([*grid, *alone])
    kept = [each.callspec._idlist for each in grid if not each.marks]
    assert [set(values) for values in zip(*kept)] == [set("abcdef"), set("ghij"), set("kl")]
    assert len(kept) < len(grid) / 3
    assert not any(each.marks for each in alone)
