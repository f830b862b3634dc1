"""Measures, in two processes, the steps that `lowtide estimate --fsdp 2` and `--tp 2` predict.

In four processes it measures the step with both options.

A scenario is (loss, model, dtype, optimizer, options).
"""

from dataclasses import replace
from unittest import mock

import torch

from lowtide.core.collectives import is_dtensor
from lowtide.memory import peak_memory
from lowtide.tools.estimate import training as module_of_training
from lowtide.tools.estimate.model import build
from lowtide.tools.estimate.setting import Dtype, Loss, Optimizer, Setting
from lowtide.tools.estimate.training import training
from tests.distributed.tensor_parallel_ranks import saved_and_loaded
from tests.support.ranks import RANKS


def parsed(kind):
    """Return (setting, loss) by name; "workspace" is 1 MiB, "by transformers" tp_plan="auto"."""
    loss, model, dtype, optimizer, *options = kind.split(", ")
    setting = Setting(
        model,
        4 if "4 sequences" in options else 1,
        64,
        Dtype(dtype),
        Optimizer(optimizer),
        checkpointing="checkpointing" in options,
        workspace=2**20 if "workspace" in options else None,
        fsdp=1 if "tp" in options else RANKS,
        shard_head="shard_head" in options,
        tp=RANKS if {"tp", "fsdp and tp"} & {*options} else 1,
    )
    return setting, Loss(loss)


def seeded(setting):
    """Return the model and the tokens that every rank has."""
    torch.manual_seed(0)
    model = build(setting)
    return model, torch.randint(model.classes, (setting.batch, setting.length))


def divided_by_transformers(setting):
    """Return the model as Transformers' own functions divide it."""
    model = build(setting)
    module = saved_and_loaded(model.module).train()
    # On the CPU the local tensors are views of the tensors that were loaded.
    for each in filter(is_dtensor, module.parameters()):
        each._local_tensor.data = each._local_tensor.data.clone()

    def loss(tokens_BT):
        return module(input_ids=tokens_BT, labels=tokens_BT, use_cache=False).loss

    return replace(model, module=module, loss=loss)


def run(kind, rank):
    """Return the bytes that this rank holds at the peak of a step, or the loss, if asked for."""
    setting, loss = parsed(kind)
    if "first loss" in kind:
        return first_loss(setting, loss)
    torch.manual_seed(0)  # under tensor parallelism ranks have the same tokens
    if "by transformers" not in kind:
        return {"peak": peak_of(setting, loss)}
    with (
        mock.patch.object(module_of_training, "build", divided_by_transformers),
        mock.patch.object(module_of_training, "divide"),
    ):
        return {"peak": peak_of(setting, loss)}


def first_loss(setting, loss):
    _, tokens_BT = seeded(setting)
    torch.manual_seed(0)
    with training(setting, loss, "cpu") as (_, model, _):
        return {"loss": model.loss(tokens_BT).item()}


def peak_of(setting, loss):
    with training(setting, loss, "cpu") as (step, model, optimizer):
        step()
        states = [each for state in optimizer.state.values() for each in state.values()]
        held = {}
        for each in (*model.module.parameters(), *model.module.buffers(), *states):
            if isinstance(each, torch.Tensor):
                storage = (each.to_local() if is_dtensor(each) else each).untyped_storage()
                held[storage.data_ptr()] = storage.nbytes()
        peaks = []
        for _ in range(5):
            with peak_memory("cpu") as peak:
                step()
            peaks.append(peak.bytes)
    # On a busy machine gloo sometimes releases the memory of a message only after the peak.
    return sum(held.values()) + min(peaks)
