"""Run a call like an earlier one straight by its engine: no checks, decisions or dispatcher.

To check, to decide and to pass torch's dispatcher takes the host longer than a small call takes the
device. All of it follows from what a signature holds (types, shapes, strides, dtypes, devices,
alignment, options, and whether gradients are tracked), and from torch's modes and transforms, which
are looked at in each call.

Shapes: N tokens, D features, V classes.
"""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lowtide.core import torch_private
from lowtide.core.autodiff import is_differentiated, scatter_gradients
from lowtide.core.matmul import on_device_of
from lowtide.core.operator import seen_by_nobody
from lowtide.core.pending_gradient import finish_gradients
from lowtide.ops.linear_cross_entropy.definition.head import (
    Arguments,
    Head,
    Labels,
    Options,
    normalizer_of,
    scale_of,
)
from lowtide.ops.linear_cross_entropy.operator import autograd, ops
from lowtide.ops.linear_cross_entropy.operator.planner import (
    make_plan,
    unreadable_operands,
    with_copies,
    with_graph_facts,
)
from lowtide.ops.linear_cross_entropy.planning.call import backend_of
from lowtide.ops.linear_cross_entropy.planning.plan import Plan
from lowtide.ops.linear_cross_entropy.planning.remembered import keep, memory

ALIGNMENT = 16  # bytes; of tensor maps, and of Triton's vectors
PLAIN = (type(None), bool, int, float, str)

Signature = tuple[Hashable, ...]


class Tensors(NamedTuple):
    """Hold the tensors of a call, a head with one term, by the names of the public arguments.

    The logit scale may be a number. A call with a number as its normaliser, which changes with each
    step, goes by the operators.
    """

    input: Tensor
    linear_weight: Tensor
    target: Tensor
    linear_bias: Tensor | None = None
    logit_scale: Any = None
    weight: Tensor | None = None
    row_weight: Tensor | None = None
    normalizer: Any = None

    @property
    def head(self) -> Head:
        scale = scale_of(self.logit_scale, self.input)
        return Head((self.input,), (self.linear_weight,), self.linear_bias, scale)

    @property
    def scale_number(self) -> float | None:
        """Return the logit scale if it is a number."""
        return self.logit_scale if type(self.logit_scale) in (int, float) else None

    @property
    def labels(self) -> Labels:
        normalizer = normalizer_of(self.normalizer, self.input)
        return Labels(self.target, self.weight, self.row_weight, normalizer)


class RememberedCall:
    """Hold what was decided for a call, but no tensor."""

    def __init__(self, plan: Plan, copied: tuple[bool, ...], scale: float | None) -> None:
        from lowtide.core.recording.recorded import RecordedFunction  # imports Triton

        self.plan, self.copied, self.scale = plan, copied, scale
        self.needs_grad = plan.needs_grad.all
        self.log_probs = plan.call_kind.log_probs
        self.by_row = self.log_probs or plan.options.reduction == "none"
        self.results = 4 if self.log_probs else 1
        self.forward, self.backward = RecordedFunction(self._forward), RecordedFunction(self._backward)

    def run(self, tensors: Tensors) -> Sequence[Tensor]:
        """Return the results, of which autograd knows if gradients are needed."""
        if self.scale is not None:
            tensors = tensors._replace(logit_scale=None)
        if any(self.needs_grad):
            kind = linear_log_probs if self.log_probs else linear_cross_entropy
            results = kind.apply(self, *tensors)
        else:
            results = self.compute(tensors)[: self.results]
        leading = tensors.input.shape[:-1]
        if not self.by_row or len(leading) == 1:
            return results  # type: ignore[no-any-return]
        # Autograd refuses changes in place of a view that a Function returns.
        return [each.view(leading) for each in results]

    def compute(self, tensors: Tensors) -> Any:
        """Return the results, and then what backward needs beside the tensors."""
        with on_device_of(tensors.input):
            return self.forward(None, *tensors)

    def gradients(
        self, tensors: Tensors, kept: Sequence[Tensor | None], grad_output: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of the head's tensors."""
        if is_differentiated(*grad_output):
            return self._differentiated(tensors, grad_output)
        if not self.by_row:
            of_head = tensors.input, tensors.linear_weight, tensors.linear_bias, tensors.logit_scale
            (grad,) = grad_output
            assert grad is not None
            return finish_gradients(kept, grad, of_head, self.needs_grad, self.plan.backend)
        given = *grad_output, *tensors, *kept
        if torch.compiler.is_compiling() or not seen_by_nobody(given):
            return self._by_operator(tensors, kept, grad_output)
        strides = tuple([None if each is None else each.stride() for each in given])
        with on_device_of(tensors.input):
            return scatter_gradients(self.backward(strides, *given), self.needs_grad)  # type: ignore[arg-type]

    def _differentiated(
        self, tensors: Tensors, grad_output: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        options, needs_grad = self.plan.options, self.needs_grad
        if self.log_probs:
            call = self._head(tensors), tensors.target, options, needs_grad
            found = autograd.differentiated_log_probs(*call, grad_output)
        else:
            of_loss = self._head(tensors), tensors.labels, options, needs_grad
            found = autograd.differentiated_loss(*of_loss, grad_output[0])
        assert found is not None
        return found

    def _by_operator(
        self, tensors: Tensors, statistics: Any, grad_output: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        options, needs_grad = self.plan.options, self.needs_grad
        if self.log_probs:
            call = self._head(tensors), tensors.target, options, needs_grad
            return autograd.of_row_log_probs(*call, statistics, grad_output)
        of_loss = self._head(tensors), tensors.labels, options, needs_grad
        return autograd.of_row_losses(*of_loss, statistics, grad_output[0])

    def _head(self, tensors: Tensors) -> Head:
        return tensors.head if self.scale is None else tensors._replace(logit_scale=self.scale).head

    # What is recorded.

    def _forward(self, *each: Any) -> list[Tensor | None]:
        tensors = Tensors(*each)
        call = self.plan, with_copies(self._head(tensors), self.copied), tensors.labels
        if not self.by_row:
            loss, gradients = ops.loss_and_gradients(*call)
            found = [] if gradients is None else [each for each in gradients.all if each is not None]
            return [loss, *(part for each in found for part in (each.tensor, each.remaining))]
        return [*(ops.row_log_probs if self.log_probs else ops.row_losses)(*call)]

    def _backward(self, *given: Any) -> list[Tensor]:
        count = 3 if self.log_probs else 1
        grad_output, tensors = given[:count], Tensors(*given[count : count + len(Tensors._fields)])
        kept = given[count + len(tensors) :]
        call = self.plan, with_copies(self._head(tensors), self.copied), tensors.labels, kept
        if self.log_probs:
            return ops.gradients_of_row_log_probs(*call, list(grad_output))
        return ops.gradients_of_row_losses(*call, *grad_output)


# None for a call that goes by the operators.
_calls: dict[Hashable, RememberedCall | None] = memory()


def signature(tensors: Tensors, *options: Any) -> Signature | None:
    """Return what tells calls apart, or None for a call that is not remembered.

    Each option is told apart by its type, too, since an error may depend on it: 1 is not True.
    """
    if torch.compiler.is_compiling() or torch_private.below_autograd is None:
        return None
    scale = tensors.scale_number
    if scale is not None:
        tensors, options = tensors._replace(logit_scale=None), (*options, scale)
    kinds = tuple(map(type, options))
    if not all(kind in PLAIN for kind in kinds):
        return None
    input, linear_weight, target, *others = tensors
    given = [input, linear_weight, target, *[each for each in others if each is not None]]
    if not all(map(_is_strided, given)) or linear_weight.dim() != 2:
        return None
    if not seen_by_nobody(given) or forward_ad._current_level >= 0:
        return None
    # In a checkpoint, a call that is computed again must save the same tensors.
    if torch_private.top_saved_tensors_hooks(True) is not None:
        return None
    if torch.is_autocast_enabled(input.device.type):
        return None
    if (input.data_ptr() | linear_weight.data_ptr()) % ALIGNMENT:
        return None
    present = tuple([each is not None for each in others])
    layouts = [(each.shape, each.stride(), each.dtype, each.device, each.requires_grad) for each in given]
    return (options, kinds, torch.is_grad_enabled(), present, *layouts)


def _is_strided(operand: Any) -> bool:
    return isinstance(operand, Tensor) and operand.layout is torch.strided and not operand.is_nested


def run(known: Signature, tensors: Tensors) -> Sequence[Tensor] | None:
    """Return the results, or None for a call that goes by the operators."""
    entry = _calls.get(known)
    return None if entry is None else entry.run(tensors)


def remember(known: Signature, tensors: Tensors, *, log_probs: bool = False, **options: Any) -> None:
    """Remember a call that has been run, if kernels of Triton compute it."""
    if known not in _calls:
        keep(_calls, known, _entry(tensors, options, log_probs=log_probs))


def _entry(tensors: Tensors, given: dict[str, Any], *, log_probs: bool) -> RememberedCall | None:
    head, target, device = tensors.head, tensors.target, tensors.input.device
    options = Options.of(tensors.input, Arguments(**given))
    others = [each for each in tensors[2:] if isinstance(each, Tensor)]
    labels = [each for each in (target, *tensors[5:]) if each is not None]
    if any(each.device != device for each in others) or any(each.requires_grad for each in labels):
        return None
    if target.is_floating_point() or not head.classes:
        return None
    tracked = torch.is_grad_enabled()
    needs_grad = tuple(tracked and each is not None and each.requires_grad for each in head.tensors)
    call_kind = ops.call_kind_of(head, target, tensors.weight, needs_grad, log_probs=log_probs)
    options = with_graph_facts(head, options, call_kind)
    if backend_of(options.engine) != "triton":
        return None
    copied = unreadable_operands(head, options, call_kind)
    plan = make_plan(with_copies(head, copied), options, call_kind)
    return RememberedCall(plan, copied, tensors.scale_number)


class linear_cross_entropy(torch.autograd.Function):
    """Compute a remembered call, and its gradients as the operator does.

    Profiles name its node after the class: as that of the operator.
    """

    @staticmethod
    def forward(ctx: Any, entry: RememberedCall, *each: Any) -> tuple[Tensor, ...]:
        tensors = Tensors(*each)
        found = entry.compute(tensors)
        results, kept = found[: entry.results], found[entry.results :]
        ctx.entry = entry
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *kept)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grad_output = grad_output[:3]  # argmax has none
        if all(each is None for each in grad_output):
            return (None,) * (1 + len(Tensors._fields))
        saved, count = ctx.saved_tensors, len(Tensors._fields)
        found = ctx.entry.gradients(Tensors(*saved[:count]), saved[count:], grad_output)
        of_input, of_weight, *of_others = found
        return (None, of_input, of_weight, None, *of_others, *(None,) * (count - 5))


class linear_log_probs(linear_cross_entropy):
    """Compute a remembered call of log-probabilities likewise."""
