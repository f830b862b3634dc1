"""One rank's slices of a small head and of its tokens, which scenarios of several ranks share.

Shapes: N tokens, D features, V classes of all ranks.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.exchange import of_all_ranks
from tests.support.loss import make_inputs
from tests.support.ranks import DEVICE

N, D, V = 24, 6, 24


class Place:
    """The slices of one rank, in equal shards of V classes and N tokens."""

    def __init__(self, size: int = V) -> None:
        self.rank, self.ranks, self.group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
        self.V_r = size // self.ranks
        self.classes = slice(self.rank * self.V_r, (self.rank + 1) * self.V_r)
        self.tokens = slice(self.rank * N // self.ranks, (self.rank + 1) * N // self.ranks)

    def leaf(self, tensor: Tensor, part: slice | None = None) -> Tensor:
        own = tensor.detach() if part is None else tensor.detach()[part]
        return own.clone().requires_grad_()

    def whole(self, own: Tensor) -> Tensor:
        """The parts of all ranks, in order."""
        return torch.cat(of_all_ranks(own))


def made(*, rows: int = N, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    torch.manual_seed(5)
    return make_inputs(rows, D, V, device=DEVICE, dtype=dtype, **options)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
