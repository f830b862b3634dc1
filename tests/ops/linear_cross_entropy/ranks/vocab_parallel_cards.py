"""What test_vocab_parallel_cuda.py runs as two processes with a card each: a step that waits for no
card, and one in a CUDA graph.

Shapes: N tokens, D features, V classes of all ranks.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

import lowtide
from tests.ops.linear_cross_entropy.ranks.place import Place
from tests.support.budgets import Inputs
from tests.support.cuda_graphs import captured
from tests.support.loss import check, make_inputs, no_synchronisation
from tests.support.ranks import DEVICE

# float32 runs an engine of logits, bfloat16 on a Hopper card one without logits.
SIZES = {torch.float32: (370, 64, 512), torch.bfloat16: (2048, 256, 8192)}


class Mean:
    """The mean of a rank's call, with replicated tokens or its own part of them."""

    def __init__(self, dtype: torch.dtype, *, tokens_sharded: bool) -> None:
        self.sizes, self.tokens_sharded, self.dtype = SIZES[dtype], tokens_sharded, dtype
        N, _, V = self.sizes
        self.place = Place(V)
        part = slice(self.place.rank * N // self.place.ranks, (self.place.rank + 1) * N // self.place.ranks)
        self.tokens = part if tokens_sharded else slice(None)
        inputs = self.inputs(0)
        self.x = self.place.leaf(inputs.input, self.tokens)
        self.w = self.place.leaf(inputs.linear_weight, self.place.classes)
        self.target = inputs.target[self.tokens].clone()

    def inputs(self, seed: int) -> Inputs:
        """Those of all ranks."""
        torch.manual_seed(seed)
        return make_inputs(*self.sizes, device=DEVICE, dtype=self.dtype)

    def put(self, inputs: Inputs) -> None:
        """Replace this rank's contents."""
        with torch.no_grad():
            self.x.copy_(inputs.input[self.tokens])
            self.w.copy_(inputs.linear_weight[self.place.classes])
            self.target.copy_(inputs.target[self.tokens])

    def step(self) -> list[Tensor]:
        """The loss and the gradients."""
        loss = lowtide.linear_cross_entropy(
            self.x, self.w, self.target, group=self.place.group, tokens_sharded=self.tokens_sharded
        )
        return [loss.detach(), *torch.autograd.grad(loss, (self.x, self.w))]

    def check(self, found: list[Tensor], inputs: Inputs) -> None:
        loss, dx, dw = found
        dx = self.place.whole(dx) if self.tokens_sharded else dx
        check({"loss": loss, "input": dx, "linear_weight": self.place.whole(dw)}, inputs)


def means() -> Iterator[Mean]:
    for dtype, tokens_sharded in product(SIZES, (False, True)):
        yield Mean(dtype, tokens_sharded=tokens_sharded)


def no_waiting() -> None:
    """A forward and backward like an earlier one: the host waits for nothing that the card does."""
    for mean in means():
        for _ in range(2):
            mean.step()
        other = mean.inputs(1)
        mean.put(other)
        with no_synchronisation(DEVICE):
            found = mean.step()
        mean.check(found, other)


def in_a_graph() -> None:
    """A graph of a forward and backward, played with other contents."""
    for mean in means():
        graph, found = captured(mean.step)
        for seed in (1, 2):
            other = mean.inputs(seed)
            mean.put(other)
            graph.replay()
            mean.check(found, other)


def run(kind: str, rank: int) -> dict[str, Any]:
    return globals()[kind]() or {}
