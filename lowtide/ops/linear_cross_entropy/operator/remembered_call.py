"""Run a call like an earlier one by its engine, without checks, decisions or torch's dispatcher.

These three take the host longer than a small call takes the device. Their outcome follows from what
a signature holds (types, shapes, strides, dtypes, devices, alignment, options, and whether
gradients are tracked), and from torch's modes and transforms, which are looked at in each call
(signatures.py).

Shapes: N tokens, D features, V classes.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.core.autodiff import in_shape, is_differentiated, scatter_gradients
from lowtide.core.matmul import on_device_of
from lowtide.core.operator import seen_by_nobody
from lowtide.core.pending_gradient import finish_gradients
from lowtide.core.strides import layouts_of
from lowtide.ops.linear_cross_entropy.definition.head import Head, Labels, Tensors
from lowtide.ops.linear_cross_entropy.operator import autograd, ops
from lowtide.ops.linear_cross_entropy.operator.planner import with_copies
from lowtide.ops.linear_cross_entropy.planning.plan import Plan


class RememberedCall:
    """Hold what was decided for a call, but no tensor."""

    def __init__(self, plan: Plan, copied: tuple[bool, ...], scale: float | None) -> None:
        from lowtide.core.recording.recorded import RecordedFunction  # imports Triton

        self.plan, self.copied, self.scale = plan, copied, scale
        self.needs_grad = plan.needs_grad.all
        self.pair = autograd.LOG_PROBS if plan.call_kind.log_probs else autograd.LOSS
        self.by_row = autograd.is_by_row(self.pair, plan.options)
        self.forward, self.backward = RecordedFunction(self._forward), RecordedFunction(self._backward)

    waits = False
    """True if the backward of other ranks waits for this one."""

    def is_current(self) -> bool:
        """Return False if what was decided holds no longer."""
        return True

    def telling_errors(self) -> contextlib.AbstractContextManager[None]:
        """Tell other ranks, whose backward waits for this one, of an error in it."""
        return contextlib.nullcontext()

    def run(self, tensors: Tensors) -> Sequence[Tensor]:
        """Return the results, of which autograd knows if gradients are needed."""
        if self.scale is not None:
            tensors = tensors._replace(logit_scale=None)
        if any(self.needs_grad):
            kind = linear_log_probs if self.pair is autograd.LOG_PROBS else linear_cross_entropy
            # No transform is on (signatures.py), so what torch.autograd.Function adds is left out.
            results = super(torch.autograd.Function, kind).apply(self, *tensors)  # type: ignore[misc]
        else:
            results = self.compute(tensors)[: self.pair.results]
        if not self.by_row:
            return results  # type: ignore[no-any-return]
        return [in_shape(each, tensors.input.shape[:-1]) for each in results]

    def compute(self, tensors: Tensors) -> Any:
        """Return the results, and then what backward needs beside the tensors."""
        with on_device_of(tensors.input):
            return self.forward(None, *tensors)

    def gradients(
        self, tensors: Tensors, kept: Sequence[Tensor | None], grad_output: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of the head's tensors."""
        if is_differentiated(*grad_output):
            call = self.plan.call(self._head(tensors))
            return autograd.differentiated(self.pair, call, tensors.labels, grad_output)
        if not self.by_row:
            of_head = tensors.input, tensors.linear_weight, tensors.linear_bias, tensors.logit_scale
            (grad,) = grad_output
            assert grad is not None
            return finish_gradients(kept, grad, of_head, self.needs_grad, self.plan.backend)
        # Forward looked at the others, and saved them without hooks.
        if torch.compiler.is_compiling() or not seen_by_nobody(grad_output):
            return self.by_operator(tensors, kept, grad_output)
        with on_device_of(tensors.input):
            found = self.gradients_by_row(tensors, kept, grad_output)
            return scatter_gradients(found, self.needs_grad)  # type: ignore[arg-type]

    def gradients_by_row(
        self, tensors: Tensors, kept: Sequence[Tensor | None], grad_output: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        """Return the wanted gradients of a call by row, recorded where such calls come often."""
        # The memory of a parameter may be another one since forward, as where it was offloaded.
        return self.backward(layouts_of([*grad_output, *tensors]), *grad_output, *tensors, *kept)

    def by_operator(
        self, tensors: Tensors, kept: Any, grad_output: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of the head's tensors by the operator, which decides anew."""
        call = self.plan.call(self._head(tensors))
        return autograd.by_operator(self.pair, call, tensors.labels, kept, grad_output)

    def _head(self, tensors: Tensors) -> Head:
        return tensors.head if self.scale is None else tensors._replace(logit_scale=self.scale).head

    # What is recorded.

    def _forward(self, *each: Any) -> list[Tensor | None]:
        return self.found(self.plan, *self.operands(Tensors(*each)))

    def _backward(self, *given: Any) -> list[Tensor]:
        grad_output, tensors, kept = self.parts(given)
        return ops.gradients_by_row(self.plan, *self.operands(tensors), kept, grad_output)

    def operands(self, tensors: Tensors) -> tuple[Head, Labels]:
        """Return the head, with copies of what the engine cannot read, and the labels."""
        return with_copies(self._head(tensors), self.copied), tensors.labels

    def parts(self, given: Sequence[Any]) -> tuple[Sequence[Any], Tensors, Sequence[Any]]:
        """Return the upstream gradients, the call's tensors, and what forward kept."""
        count = self.pair.upstream
        end = count + len(Tensors._fields)
        return given[:count], Tensors(*given[count:end]), given[end:]

    def found(self, plan: Plan, head: Head, labels: Labels) -> list[Tensor | None]:
        """Return the results, and then what backward needs beside the tensors."""
        if not self.by_row:
            loss, gradients = ops.loss_and_gradients(plan, head, labels)
            found = [] if gradients is None else [each for each in gradients.all if each is not None]
            return [loss, *(part for each in found for part in (each.tensor, each.remaining))]
        return [*ops.results_by_row(plan, head, labels)]


class linear_cross_entropy(torch.autograd.Function):
    """Compute a remembered call, and its gradients as the operator does.

    Profiles name its node after the class: as that of the operator.
    """

    @staticmethod
    def forward(ctx: Any, entry: RememberedCall, *each: Any) -> tuple[Tensor, ...]:
        tensors = Tensors(*each)
        found = entry.compute(tensors)
        results, kept = found[: entry.pair.results], found[entry.pair.results :]
        ctx.entry = entry
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *kept)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        entry = ctx.entry
        grad_output = grad_output[: entry.pair.upstream]
        if all(each is None for each in grad_output) and not entry.waits:
            return (None,) * (1 + len(Tensors._fields))
        with entry.telling_errors():
            saved, count = ctx.saved_tensors, len(Tensors._fields)
            found = entry.gradients(Tensors(*saved[:count]), saved[count:], grad_output)
        of_input, of_weight, *of_others = found
        return (None, of_input, of_weight, None, *of_others, *(None,) * (count - 5))


class linear_log_probs(linear_cross_entropy):
    """Compute a remembered call of log-probabilities likewise."""
