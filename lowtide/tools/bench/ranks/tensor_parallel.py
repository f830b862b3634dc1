"""List what is measured of a head whose classes are divided over ranks.

"lowtide-no-collectives" shows how much of the time lowtide's collectives take. Its first call
gathers, and later ones get what that gathered; sums over the ranks are left out. So products and
kernels are those of the real call, and the results are wrong. What stays is that the host reads the
ranks' messages, and waits for the device there.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from lowtide.core.collectives import Group, Wait
from lowtide.tools.bench.cases import Inputs, LossCase
from lowtide.tools.bench.providers import PROVIDERS, Loss, Provider, TimedCall, lowtide_provider


class WithoutCollectives(Provider):
    """Leave the collectives out. Backward of a mean has none: forward forms its gradients."""

    def call(self, case: LossCase, inputs: Inputs) -> TimedCall:
        loss = self.load(case)
        gathered: list[Tensor] = []

        def run() -> tuple[Tensor, ...]:
            with without_collectives(gathered):
                return (loss(*inputs),)

        return TimedCall(run, inputs[:2], exact=False)


@contextmanager
def without_collectives(gathered: list[Tensor]) -> Iterator[None]:
    """Let gathers of the block return what `gathered` holds, in order; the first block fills it."""
    own = {name: vars(Group)[name] for name in ("gather", "sum_", "scatter_sum")}
    before = iter([*gathered])
    filled = bool(gathered)

    def gather(group: Group, tensor: Tensor) -> Wait:
        if not filled:
            gathered.append(own["gather"](group, tensor)())
        found = next(before) if filled else gathered[-1]
        return lambda: found

    replaced = {
        "gather": gather,
        "sum_": lambda group, tensor: lambda: tensor,
        "scatter_sum": lambda group, tensor: lambda: tensor[0],
    }
    try:
        for name, each in replaced.items():
            setattr(Group, name, each)
        yield
    finally:
        for name, each in own.items():
            setattr(Group, name, each)


def _loss_parallel(case: LossCase) -> Loss:
    from lowtide.tools.bench.ranks.loss_parallel import loss_parallel_of

    loss: Loss = loss_parallel_of(case)
    return loss


DIVIDED = (
    *(provider for provider in PROVIDERS if provider.distribution == "lowtide"),
    WithoutCollectives("lowtide-no-collectives", "lowtide", lowtide_provider("lowtide", None).load),
    Provider("loss-parallel", "torch", _loss_parallel),
)
