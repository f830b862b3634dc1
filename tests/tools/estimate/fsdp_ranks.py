"""Measures, as two processes of test_fsdp.py, the steps that `lowtide estimate --fsdp 2` foretells.

A scenario is (loss, model, dtype, optimizer, options).
"""

import torch

from lowtide.core.collectives import is_dtensor
from lowtide.memory import peak_memory
from lowtide.tools.estimate.setting import Dtype, Loss, Optimizer, Setting
from lowtide.tools.estimate.training import training
from tests.support.ranks import RANKS, as_rank


def parsed(kind):
    """(setting, loss) of a scenario; `workspace` is one of 1 MiB."""
    loss, model, dtype, optimizer, *options = kind.split(", ")
    setting = Setting(
        model,
        1,
        64,
        Dtype(dtype),
        Optimizer(optimizer),
        checkpointing="checkpointing" in options,
        workspace=2**20 if "workspace" in options else None,
        fsdp=RANKS,
        shard_head="shard_head" in options,
    )
    return setting, Loss(loss)


def run(kind, rank):
    """The bytes that this rank holds at the peak of a step."""
    with training(*parsed(kind), "cpu") as (step, model, optimizer):
        step()
        states = [each for state in optimizer.state.values() for each in state.values()]
        held = {}
        for each in (*model.module.parameters(), *model.module.buffers(), *states):
            if isinstance(each, torch.Tensor):
                storage = (each.to_local() if is_dtensor(each) else each).untyped_storage()
                held[storage.data_ptr()] = storage.nbytes()
        with peak_memory("cpu") as peak:
            step()
    return {"peak": sum(held.values()) + peak.bytes}


if __name__ == "__main__":
    as_rank(run)
