"""Run a call of a divided head like an earlier one by its engine, without deciding again.

The ranks agree anew in each call (ranks/agreement.py), since no rank knows what the others call
next. As long as all say the same again, the launches and collectives that follow are recorded.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from lowtide.core.collectives import group_named
from lowtide.core.matmul import on_device_of
from lowtide.core.strides import layouts_of
from lowtide.ops.linear_cross_entropy.definition.head import Tensors
from lowtide.ops.linear_cross_entropy.engines.saved_stats import call_number, with_number
from lowtide.ops.linear_cross_entropy.operator import ops
from lowtide.ops.linear_cross_entropy.operator.own_call import (
    compared,
    equal_tensors_of,
    own_call,
    upstream_of,
)
from lowtide.ops.linear_cross_entropy.operator.planner import rows_for
from lowtide.ops.linear_cross_entropy.operator.remembered_call import RememberedCall
from lowtide.ops.linear_cross_entropy.planning.plan import Plan
from lowtide.ops.linear_cross_entropy.ranks import equal_values, messages
from lowtide.ops.linear_cross_entropy.ranks.agreement import Agreement, Terms


class RememberedCallOfRanks(RememberedCall):
    """Hold what was decided for a call of a divided head, but no tensor."""

    def __init__(self, plan: Plan, copied: tuple[bool, ...], scale: float | None, tensors: Tensors) -> None:
        super().__init__(plan, copied, scale)
        self.waits = bool(plan.options.group) and self.by_row
        self.forward_pass = AgreedPass(self, tensors, self._compared)
        self.backward_passes: dict[tuple[bool, ...], AgreedPass] = {}
        """For each choice of results that have an upstream gradient, its pass."""

    def is_current(self) -> bool:
        group = self.forward_pass.terms.group
        return not group.name or group_named(group.name) is group.group

    def telling_errors(self) -> contextlib.AbstractContextManager[None]:
        return messages.telling_errors(self.plan.options.group) if self.waits else contextlib.nullcontext()

    def compute(self, tensors: Tensors) -> Any:
        with on_device_of(tensors.input):
            found, agreed = self.forward_pass.run(tensors, None, tensors)
        return with_number(found, agreed) if self.by_row else found

    def gradients_by_row(
        self, tensors: Tensors, kept: Sequence[Tensor | None], grad_output: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        if not self.is_current():  # the group has ended since forward
            return list(self.by_operator(tensors, kept, grad_output))
        which = tuple([each is not None for each in grad_output])
        if which not in self.backward_passes:
            upstream = upstream_of(grad_output)
            self.backward_passes[which] = AgreedPass(self, tensors, self._compared_by_row, upstream)
        number = call_number(kept) if self.waits else None
        given = *grad_output, *tensors, *(kept[:-1] if self.waits else kept)
        return self.backward_passes[which].run(tensors, layouts_of(given), given, number)[0]

    # What is recorded.

    def _compared(self, plan: Plan, *each: Any) -> list[Tensor | None]:
        head, labels, differ_k = compared(plan, *self.operands(Tensors(*each)))
        return [*self.found(plan, head, labels), differ_k]

    def _compared_by_row(self, plan: Plan, *given: Any) -> list[Tensor | None]:
        grad_output, tensors, kept = self.parts(given)
        head, labels, differ_k = compared(plan, *self.operands(tensors))
        return [*ops.gradients_by_row(plan, head, labels, kept, grad_output), differ_k]


class AgreedPass:
    """Hold what a rank tells the others of a forward or a backward pass, and its recording."""

    def __init__(
        self,
        call: RememberedCallOfRanks,
        tensors: Tensors,
        function: Callable[..., list[Tensor | None]],
        upstream: dict[str, bool] | None = None,
    ) -> None:
        """Hold what this rank tells; nothing is recorded yet.

        `function` takes the plan that the ranks agree on; `upstream` is given for a backward.
        """
        self.call, self.function = call, function
        own = own_call(call.plan, *call.operands(tensors), partial(self._rows_for, tensors), upstream)
        self.terms, self.names = Terms(own), own.compared_on_device
        self.agreed: tuple[Agreement, Any] | None = None
        """Holds what the ranks agreed on last, and the function for it, recorded."""

    def run(
        self, tensors: Tensors, likeness: Any, given: Sequence[Tensor | None], number: int | None = None
    ) -> tuple[list[Any], Agreement]:
        """Return the function's results for the `given` tensors, and what the ranks agree on."""
        from lowtide.core.recording.recorded import RecordedFunction  # imports Triton

        # All tensors are on one device. If it is not the hosts', they compare none.
        equal: dict[str, Tensor | None] = {}
        if self.terms.device.type == "cpu":
            equal = equal_tensors_of(self.call.plan, *self.call.operands(tensors))
        found, number = self.terms.agree(equal, partial(self._rows_for, tensors), number)
        known = self.agreed
        if known is None or known[0] is not found:
            function = partial(self.function, self.call.plan.agreed(found))
            self.agreed = known = found, RecordedFunction(function)
        *results, differ_k = known[1](likeness, *given)
        if differ_k is not None:
            equal_values.tell_hosts(found.group, self.names, differ_k)
        return results, replace(found, number=number)

    def _rows_for(self, tensors: Tensors, rank_tokens: int) -> int:
        head, _ = self.call.operands(tensors)
        return rows_for(self.call.plan.call(head), rank_tokens)
