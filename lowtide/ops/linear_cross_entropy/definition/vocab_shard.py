"""Divide the classes of a vocabulary over the ranks of a mesh; the numbers may be symbols."""

from typing import Any

import torch


def classes_of_rank(mesh: Any, num_classes: int, dimension: int = 0) -> slice:
    """Return this rank's classes if Shard(0) divides them over a dimension of the mesh.

    The rule is that of torch.chunk and of FSDP2. In torch's local-tensor mode the numbers are
    symbols, and a symbol stands for the numbers of all ranks.
    """
    size = -(-num_classes // mesh.size(dimension))
    first = least(mesh.get_local_rank(dimension) * size, num_classes)
    return slice(first, least(first + size, num_classes))


def least(first: Any, second: Any) -> Any:
    """Return the smaller number.

    For symbols torch.sym_min returns a symbol. Plain numbers take Python's min, which every release
    of torch traces.
    """
    return torch.sym_min(first, second) if _symbolic(first, second) else min(first, second)


def greatest(first: Any, second: Any) -> Any:
    """Return the larger number, which may be a symbol as in `least`."""
    return torch.sym_max(first, second) if _symbolic(first, second) else max(first, second)


def _symbolic(*numbers: Any) -> bool:
    return any(isinstance(each, torch.SymInt) for each in numbers)
