"""List what is measured of a head whose classes are divided over ranks.

"lowtide-no-collectives" shows how much of the time lowtide's collectives take. In it a gather
repeats this rank's part for every rank, and sums over ranks are left out. Products and kernels are
those of the real call; the results are wrong. Only the messages by which the hosts agree on a call
are still sent.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from lowtide.core.collectives import Group
from lowtide.ops.linear_cross_entropy.operator import signatures
from lowtide.ops.linear_cross_entropy.ranks.messages import MESSAGE_BYTES
from lowtide.tools.bench.cases import Inputs, LossCase
from lowtide.tools.bench.providers import PROVIDERS, Provider, TimedCall, lowtide_provider
from lowtide.tools.bench.ranks.loss_parallel import loss_parallel_of


class WithoutCollectives(Provider):
    """Leave the collectives out. Backward of a mean has none: forward forms its gradients."""

    def call(self, case: LossCase, inputs: Inputs) -> TimedCall:
        loss = self.load(case)
        calls: dict[Any, Any] = {}

        def run() -> tuple[Tensor, ...]:
            with without_collectives(calls):
                return (loss(*inputs),)

        return TimedCall(run, inputs[:2], exact=False)


@contextmanager
def without_collectives(calls: dict[Any, Any]) -> Iterator[None]:
    """Leave out the collectives of the block, whose calls are remembered in `calls`."""

    def begin(group: Group, collective: Callable[..., Any], *tensors: Tensor) -> Any:
        if tensors[0].is_cpu and tensors[-1].numel() == MESSAGE_BYTES:
            return own_begin(group, collective, *tensors)
        if len(tensors) == 2:
            all_ranks, own = sorted(tensors, key=Tensor.numel, reverse=True)
            if tensors[0] is all_ranks:
                all_ranks.view(group.size, -1).copy_(own.view(1, -1).expand(group.size, -1))
            else:
                own.copy_(all_ranks[: own.numel()])
        return SimpleNamespace(wait=lambda: None)  # a collective that has ended

    own_begin, own_calls = Group._begin, signatures._calls
    Group._begin, signatures._calls = begin, calls  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        Group._begin, signatures._calls = own_begin, own_calls  # type: ignore[method-assign]


DIVIDED = (
    *(provider for provider in PROVIDERS if provider.distribution == "lowtide"),
    WithoutCollectives("lowtide-no-collectives", "lowtide", lowtide_provider("lowtide", None).load),
    Provider("loss-parallel", "torch", loss_parallel_of),
)
