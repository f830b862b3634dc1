"""The inputs of one call, which its name seeds.

Shapes: V classes.
"""

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16

Outputs = dict[str, Tensor]
Function = Callable[..., Any]
"""It takes the differentiated tensors in their order, and returns a tensor, or a tuple or dict with
numbers."""


class Given:
    """Inputs of one call: drawn on the CPU by a generator that its name seeds, then moved."""

    def __init__(self, name: str, device: str) -> None:
        self.device, self.generator = device, torch.Generator().manual_seed(zlib.crc32(name.encode()))
        self.leaves: dict[str, Tensor] = {}

    def numbers(self, *shape: int, dtype: torch.dtype = F32, scale: float = 1.0) -> Tensor:
        drawn = torch.randn(shape, generator=self.generator).mul_(scale)
        return drawn.to(dtype).to(self.device)

    def leaf(self, name: str, *shape: int, dtype: torch.dtype = F32, scale: float = 1.0) -> Tensor:
        return self.track(name, self.numbers(*shape, dtype=dtype, scale=scale))

    def track(self, name: str, tensor: Tensor) -> Tensor:
        self.leaves[name] = tensor.requires_grad_()
        return tensor

    def weight(self, name: str, V: int, *rest: int, dtype: torch.dtype = F32) -> Tensor:
        return self.leaf(name, V, *rest, dtype=dtype, scale=2 / rest[-1] ** 0.5)

    def classes(self, V: int, *shape: int, ignore_index: int | None = None) -> Tensor:
        target = torch.randint(V, shape, generator=self.generator)
        ignored = torch.rand(shape, generator=self.generator) < 0.2
        return target.masked_fill_(ignored, -100 if ignore_index is None else ignore_index).to(self.device)

    def bools(self, *shape: int, rate: float = 0.7) -> Tensor:
        return (torch.rand(shape, generator=self.generator) < rate).to(self.device)


Make = Callable[[Given], Function]
