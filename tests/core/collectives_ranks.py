"""What test_collectives.py runs as three processes."""

import pytest
import torch
import torch.distributed as dist

from lowtide.core import collectives
from tests.support.ranks import Result

MEMBERS = ([0, 1], [1, 2], [0, 1, 2], [0, 1])


def run(kind: str, rank: int) -> Result:
    assert kind == "between_hosts"
    groups = [dist.new_group(ranks) for ranks in MEMBERS]
    found = []
    with pytest.MonkeyPatch.context() as patch:
        # Behave as with a group of NCCL, which only moves tensors of cards.
        patch.setattr(collectives, "_moves_cpu_tensors", lambda group: False)
        for ranks, group in zip(MEMBERS, groups):
            if rank in ranks:
                mine = torch.full((2, 3), rank, dtype=torch.uint8, device="cpu")
                gathered = collectives.Group(group.group_name).of_hosts.gather(mine)()
                found.append((tuple(gathered.shape), gathered[:, 1, 2].tolist()))
    return {"found": found, "expected": [((len(each), 2, 3), each) for each in MEMBERS if rank in each]}
