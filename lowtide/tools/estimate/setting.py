"""Define the choices that determine the memory of a training step."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum

import torch
from torch import nn

from lowtide.core.collectives import is_dtensor
from lowtide.tools.layers import parameter_groups


class Dtype(str, Enum):
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"
    autocast = "autocast"  # Weights in float32, products in bfloat16.

    @property
    def weights(self) -> torch.dtype:
        return torch.float32 if self is Dtype.autocast else getattr(torch, self.value)

    def precision(self, device: str) -> AbstractContextManager:
        return torch.autocast(device, torch.bfloat16) if self is Dtype.autocast else nullcontext()


class Optimizer(str, Enum):
    adamw = "adamw"
    sgd = "sgd"
    adafactor = "adafactor"

    def of(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer, fused where torch can: no temporaries of the model's size."""
        parameters = [*parameters]
        groups = parameter_groups(parameters)
        if self is Optimizer.adamw:
            return torch.optim.AdamW(groups, fused=True)
        if self is Optimizer.sgd:
            fused = not any(map(is_dtensor, parameters))  # torch has no fused SGD for DTensors
            return torch.optim.SGD(groups, lr=1e-3, momentum=0.9, fused=fused)
        return torch.optim.Adafactor(groups, foreach=False)


class Loss(str, Enum):
    eager = "eager"
    lowtide = "lowtide"


@dataclass(frozen=True)
class Setting:
    model: str  # A name, or the path of a config.json.
    batch: int
    length: int
    dtype: Dtype = Dtype.bfloat16
    optimizer: Optimizer = Optimizer.adamw
    checkpointing: bool = False
    workspace: int | None = None  # In bytes, for lowtide.
    fsdp: int = 1  # Ranks of FSDP2.
    shard_head: bool = False  # True to apply lowtide.shard_head.
    tp: int = 1  # Ranks of tensor parallelism.

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def ranks(self) -> int:
        return self.fsdp * self.tp
