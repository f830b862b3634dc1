"""Say which classes of a vocabulary a rank holds, and how the ranks share tokens.

A head whose classes are divided over the ranks of a group is called sharded: each rank has the
weight's rows [V_r, D] of its own classes, and the same slice of the bias, of class weights and of
class probabilities.

Shapes: V classes of the vocabulary, of which rank r holds V_r.
"""

from typing import Any, NamedTuple

import torch


class VocabShard(NamedTuple):
    """Hold the place of one rank's classes, in the order of the operators' schema."""

    group: str = ""
    """The name of the process group; "" for one process alone."""
    ranks: int = 1
    first_class: int = 0
    num_classes: int = 0
    """V, the classes of all ranks together; 0 for a head that is not sharded."""
    tokens_sharded: bool = False
    """True if each rank has tokens of its own, whose losses count together."""
    segments: int = 0
    """Divide the classes into so many parts, whose statistics are added in order; 0 for none."""

    @property
    def segment_classes(self) -> int:
        """Return the classes of a segment; the last ones may be smaller or empty."""
        return -(-self.num_classes // self.segments)

    @property
    def parts(self) -> int:
        """Return how many parts the statistics of a row are merged from."""
        return self.segments or self.ranks

    def parts_of(self, first_class: int, classes: int) -> list[slice]:
        """Return the slices of a rank's own classes whose statistics are kept apart."""
        if not self.segments:
            return [slice(0, classes)]
        size = self.segment_classes
        return [slice(start, min(start + size, classes)) for start in range(0, classes, size)]


def classes_of_rank(mesh: Any, num_classes: int, dimension: int = 0) -> slice:
    """Return the classes of this rank where Shard(0) divides them over a dimension of the mesh.

    That is the rule of torch.chunk, and of FSDP2. In torch's local-tensor mode these numbers are
    symbols, each of which stands for those of all ranks.
    """
    size = -(-num_classes // mesh.size(dimension))
    first = least(mesh.get_local_rank(dimension) * size, num_classes)
    return slice(first, least(first + size, num_classes))


def least(first: Any, second: Any) -> Any:
    """Return the smaller number; of symbols torch returns a symbol, and no graph takes that call."""
    return torch.sym_min(first, second) if _symbolic(first, second) else min(first, second)


def greatest(first: Any, second: Any) -> Any:
    """Return the larger number, as `least` does the smaller one."""
    return torch.sym_max(first, second) if _symbolic(first, second) else max(first, second)


def _symbolic(*numbers: Any) -> bool:
    return any(isinstance(each, torch.SymInt) for each in numbers)
