"""Divide the classes of a vocabulary over the ranks of a mesh, in numbers that may be symbols."""

from typing import Any

import torch


def classes_of_rank(mesh: Any, num_classes: int, dimension: int = 0) -> slice:
    """Return the classes of this rank where Shard(0) divides them over a dimension of the mesh.

    That is the rule of torch.chunk, and of FSDP2. In torch's local-tensor mode these numbers are
    symbols, each of which stands for those of all ranks.
    """
    size = -(-num_classes // mesh.size(dimension))
    first = least(mesh.get_local_rank(dimension) * size, num_classes)
    return slice(first, least(first + size, num_classes))


def least(first: Any, second: Any) -> Any:
    """Return the smaller number; of symbols torch returns a symbol, and no graph takes it."""
    return torch.sym_min(first, second) if _symbolic(first, second) else min(first, second)


def greatest(first: Any, second: Any) -> Any:
    """Return the larger number, as `least` does the smaller one."""
    return torch.sym_max(first, second) if _symbolic(first, second) else max(first, second)


def _symbolic(*numbers: Any) -> bool:
    return any(isinstance(each, torch.SymInt) for each in numbers)
