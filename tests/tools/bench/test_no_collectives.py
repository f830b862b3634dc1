"""The entry without collectives: what it gathered once comes again, and nothing is sent."""

import torch

from lowtide.core.collectives import Group
from lowtide.tools.bench.ranks.tensor_parallel import without_collectives

ONE, OTHER = torch.tensor([1.0]), torch.tensor([2.0])


def test_gathers_come_again(monkeypatch):
    sent = []

    def gather(group, tensor):
        sent.append(tensor)
        return lambda: torch.stack([tensor, tensor + 10])

    monkeypatch.setattr(Group, "gather", gather)
    group, gathered = Group(""), []
    for _ in range(3):
        with without_collectives(gathered):
            waits = [group.gather(each) for each in (ONE, OTHER)]
            assert [wait().tolist() for wait in reversed(waits)] == [[[2.0], [12.0]], [[1.0], [11.0]]]
    assert len(sent) == 2, "those of the first block"
    assert Group.gather is gather
    group.gather(ONE)
    assert len(sent) == 3


def test_sums_are_left_out_and_come_back():
    before = {name: vars(Group)[name] for name in ("gather", "sum_", "scatter_sum")}
    group, tensor_PN = Group(""), torch.arange(6.0).view(2, 3)
    with without_collectives([]):
        assert group.sum_(tensor_PN)() is tensor_PN
        assert torch.equal(group.scatter_sum(tensor_PN)(), tensor_PN[0])
        assert vars(Group)["sum_"] is not before["sum_"]
    assert {name: vars(Group)[name] for name in before} == before
