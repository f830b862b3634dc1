"""Move tensors between the ranks of one process group, by torch.distributed alone.

An operator's schema has no process group, so a group travels by its name. Every collective is
asynchronous: it returns a function that waits for it. On CUDA that function makes the current
stream wait, not the host. Gathers move bytes, so they round nothing, and all ranks hold the same
bits.

Numbers that the host itself needs move between the hosts (`of_hosts`): reading them from a device
would wait for all the work that is queued on that device.

A rehearsal (core/compile_ahead) speaks to no rank: it notes a Begin and an End for each collective.

Each rank must issue the same collectives in the same order.
"""

import copy
import functools
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lowtide.core.compile_ahead.notes import note

Wait = Callable[[], Tensor]


class Begin(NamedTuple):
    """Hold the function that begins a collective, and its tensors."""

    begin: Callable[..., Any]
    tensors: tuple[Tensor, ...]

    def wait(self) -> None:
        note(End(self))


class End(NamedTuple):
    """Hold the collective that is waited for: a Begin, or the step that a recording makes of it."""

    begun: Any


class Group:
    """Hold a process group, or one rank alone if the name is ""."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.group: Any = group_named(name) if name else None
        self.size: int = self.group.size() if self.group else 1
        self.rank: int = self.group.rank() if self.group else 0

    @property
    def of_hosts(self) -> "Group":
        """Return a group of the same ranks that can gather tensors on the CPU."""
        if self.size == 1 or _moves_cpu_tensors(self.group):
            return self
        hosts = copy.copy(self)
        hosts.group = _between_hosts(self.group)
        return hosts

    def gather(self, tensor: Tensor) -> Wait:
        """Gather the tensors of all ranks, which have one shape, as [ranks, ...]."""
        if self.size == 1:
            return lambda: tensor[None]
        tensor = tensor.contiguous()
        out = tensor.new_empty(self.size, *tensor.shape)
        if not tensor.numel():
            return lambda: out
        # Not every backend moves every dtype, but all move bytes.
        mine, all_ranks = (each.view(-1).view(torch.uint8) for each in (tensor, out))
        if isinstance(self.group, dist.ProcessGroup):
            gather = _of_one_tensor("all_gather_single", "all_gather_into_tensor")
            work = self._begin(gather, all_ranks, mine)
        else:  # the group is a connection of hosts
            work = self.group.allgather([[*all_ranks.chunk(self.size)]], [mine])
        return _after(work, out, tensor)

    def sum_(self, tensor: Tensor) -> Wait:
        """Replace a contiguous tensor by its sum over the ranks."""
        if self.size == 1 or not tensor.numel():
            return lambda: tensor
        return _after(self._begin(dist.all_reduce, tensor), tensor)

    def scatter_sum(self, tensor: Tensor) -> Wait:
        """Sum [ranks, ...] over the ranks, and return this rank's part of the sum."""
        if self.size == 1:
            return lambda: tensor[0]
        out = torch.empty_like(tensor[0])
        if not tensor.numel():
            return lambda: out
        scatter = _of_one_tensor("reduce_scatter_single", "reduce_scatter_tensor")
        work = self._begin(scatter, out.view(-1), tensor.view(-1))
        return _after(work, out, tensor)

    def _begin(self, collective: Callable[..., Any], *tensors: Tensor) -> Any:
        """Begin a collective of torch, and return what can be waited for."""
        begin = Begin(functools.partial(collective, group=self.group, async_op=True), tensors)
        return begin if note(begin) else begin.begin(*tensors)


def _after(work: Any, out: Tensor, *held: Tensor) -> Wait:
    """Return a function that waits and returns `out`; the `held` tensors live until then."""

    def wait() -> Tensor:
        work.wait()
        del held_until_then[:]
        return out

    held_until_then = [*held]
    return wait


@functools.cache
def _of_one_tensor(name: str, old: str) -> Any:
    """Return a collective by its name since torch 2.13, where the old one warns."""
    return getattr(dist, name, None) or getattr(dist, old)


# The connection of hosts of each group that moves only tensors on a device.
_of_hosts: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_made: Counter[tuple[int, ...]] = Counter()
"""Counts connections of hosts that this process has made, by the ranks that they connect."""


def _moves_cpu_tensors(group: Any) -> bool:
    return any(each.startswith("cpu:") for each in dist.get_backend_config(group).split(","))


def _between_hosts(group: Any) -> Any:
    """Return a Gloo connection of a group's ranks, which make it together at their first call.

    The connection is not a process group of torch. Each rank would name such a group by the number
    of groups that the rank is in, and ranks with different numbers would wait for each other for
    ever.
    """
    if group not in _of_hosts:
        ranks = tuple(dist.get_process_group_ranks(group))
        place = f"lowtide/hosts/{'_'.join(map(str, ranks))}/{_made[ranks]}"
        store = dist.PrefixStore(place, dist.distributed_c10d._get_default_store())
        device = torch.device(dist.get_backend_config(group).split(":")[0])
        options = getattr(group._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", dist.default_pg_timeout)
        _of_hosts[group] = dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout)
        _made[ranks] += 1
    return _of_hosts[group]


def group_named(name: str) -> Any:
    """Return the process group of that name; torch has no public function for it."""
    return dist.distributed_c10d._resolve_process_group(name)


def is_dtensor(value: object) -> bool:
    """Return True for a DTensor, without importing torch.distributed.tensor."""
    return type(value).__name__ == "DTensor"


def part_of_rank(tensor: Any) -> Tensor:
    """Return this rank's part of a DTensor, in the same memory, or the tensor itself."""
    part: Tensor = tensor._local_tensor if is_dtensor(tensor) else tensor
    return part
