"""Runs stages of torch.distributed.pipelining as two processes, for test_pipeline.py. The last
stage returns hidden states and holds the head. A scenario, named after torch's schedule, returns
the relative error of each gradient of this rank's stages, against one process, in float64.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import pipelining

import lowtide
from tests.support.ranks import DEVICE, RANKS, generator, largest_errors

D, V, MICRO_BATCHES = 8, 25, 4


class Stage(nn.Module):
    def __init__(self, place: int, stages: int) -> None:
        super().__init__()
        torch.manual_seed(place)
        self.embedding = None if place else nn.Embedding(V, D)
        self.body = nn.Linear(D, D)
        self.lm_head = nn.Linear(D, V) if place == stages - 1 else None
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = x if self.embedding is None else self.embedding(x)
        return torch.tanh(self.body(hidden))


def run(kind: str, rank: int) -> dict[str, Any]:
    schedule = getattr(pipelining, f"Schedule{kind}")
    several = "Interleaved" in kind
    count = 2 * RANKS if several else RANKS
    stages, alone = ([Stage(place, count) for place in range(count)] for _ in range(2))
    head, own = stages[-1].lm_head, range(rank, count, RANKS)

    def loss_fn(hidden: Tensor, labels: Tensor) -> Tensor:
        return lowtide.linear_cross_entropy(hidden, head.weight, labels, linear_bias=head.bias)

    device = torch.device(DEVICE)
    staged = [pipelining.PipelineStage(stages[place], place, count, device) for place in own]
    steps = schedule(staged if several else staged[0], MICRO_BATCHES, loss_fn=loss_fn)
    tokens, labels = torch.randint(V, (2, MICRO_BATCHES, 5), generator=generator(1))
    losses: list[Tensor] = []
    given = (tokens,) if rank == 0 else ()
    steps.step(*given, **({"target": labels, "losses": losses} if count - 1 in own else {}))

    hidden = tokens
    for stage in alone:
        hidden = stage(hidden)
    expected = F.cross_entropy(alone[-1].lm_head(hidden).flatten(0, -2), labels.flatten())
    expected.backward()
    if losses:
        torch.testing.assert_close(torch.stack(losses).mean(), expected, rtol=1e-14, atol=0)
    found = nn.ModuleList(stages[place] for place in own)
    return {"errors": largest_errors(found, nn.ModuleList(alone[place] for place in own))}
