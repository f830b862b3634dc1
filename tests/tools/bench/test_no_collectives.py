"""The entry without collectives: nothing is sent, but for messages of the hosts."""

import pytest
import torch
import torch.distributed as dist

from lowtide.core.collectives import Group
from lowtide.ops.linear_cross_entropy.operator import signatures
from lowtide.ops.linear_cross_entropy.ranks.messages import MESSAGE_BYTES
from lowtide.tools.bench.ranks.tensor_parallel import without_collectives

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")


@pytest.fixture
def group():
    """A group of two ranks, of which this process is one and the other does not exist."""
    made = Group("")
    made.group, made.size = dist.ProcessGroup(0, 2), 2
    return made


def test_gathers_copy_what_this_rank_has(group):
    with without_collectives({}):
        for _ in range(3):
            waits = [group.gather(torch.tensor([number, 5.0])) for number in (1.0, 2.0)]
            assert [wait().tolist() for wait in waits] == [[[1.0, 5.0]] * 2, [[2.0, 5.0]] * 2]


def test_sums_are_left_out(group):
    tensor_PN = torch.arange(6.0).view(2, 3)
    with without_collectives({}):
        assert group.sum_(tensor_PN)() is tensor_PN
        assert torch.equal(group.scatter_sum(tensor_PN)(), tensor_PN[0])
    assert torch.equal(tensor_PN, torch.arange(6.0).view(2, 3))


def test_messages_are_sent(group, monkeypatch):
    """The hosts agree in each call, and calls are remembered apart from others."""
    begun, calls, before = [], {}, signatures._calls
    monkeypatch.setattr(Group, "_begin", lambda group, collective, *tensors: begun.append(tensors))
    own = Group._begin
    with without_collectives(calls):
        assert signatures._calls is calls
        group.gather(torch.zeros(MESSAGE_BYTES, dtype=torch.uint8))
        group.gather(torch.zeros(3))
    assert [each[-1].numel() for each in begun] == [MESSAGE_BYTES]
    assert signatures._calls is before
    assert Group._begin is own
