"""Runs, as two processes of test_shard_head.py, models whose head lowtide.shard_head has divided,
beside one process that has all of the data, and beside FSDP2 alone: the scenarios of this folder.
"""

from tests.distributed.shard_head.calls import (
    deferred_by_chunks,
    known,
    not_a_member,
    options,
    positions,
    wrong_on_one_rank,
    z_loss,
)
from tests.distributed.shard_head.distillations import distillation, distillation_refused
from tests.distributed.shard_head.steps import one_step
from tests.distributed.shard_head.training import as_fsdp, assigned, checkpointed
from tests.distributed.shard_head.upstream import orders_of_backward, scaled_apart
from tests.support.ranks import RANKS, mesh_of

OTHERS = {
    "distillation": distillation,
    "distillation refused": distillation_refused,
    "positions": positions,
    "z-loss": z_loss,
    "deferred by chunks": deferred_by_chunks,
    "not a member": not_a_member,
    "known": known,
    "padded and refused": options,
    "wrong on one rank": wrong_on_one_rank,
    "as fsdp": as_fsdp,
    "checkpointed": checkpointed,
    "assigned": assigned,
    "scaled apart": scaled_apart,
    "orders of backward": orders_of_backward,
}


def run(kind, rank):
    mesh = mesh_of(RANKS)
    return OTHERS.get(kind, one_step)(kind, rank, mesh)
