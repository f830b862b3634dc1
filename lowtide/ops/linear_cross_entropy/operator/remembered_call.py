"""Run a loss like an earlier one straight by its engine: no checks, decisions or dispatcher.

To check, to decide and to pass torch's dispatcher takes the host longer than a small call takes the
device. All of it follows from what a signature holds (types, shapes, strides, dtypes, devices,
alignment, options, and whether gradients are tracked), and from torch's modes and transforms, which
are looked at in each call.

Shapes: N tokens, D features, V classes.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lowtide.core import torch_private
from lowtide.core.matmul import on_device_of
from lowtide.core.operator import seen_by_nobody
from lowtide.core.pending_gradient import finish_gradients
from lowtide.ops.linear_cross_entropy.definition.head import Arguments, Head, Labels, Options
from lowtide.ops.linear_cross_entropy.operator import ops
from lowtide.ops.linear_cross_entropy.operator.autograd import differentiated_loss
from lowtide.ops.linear_cross_entropy.operator.planner import make_plan, unreadable_operands, with_graph_facts
from lowtide.ops.linear_cross_entropy.planning.call import backend_of
from lowtide.ops.linear_cross_entropy.planning.plan import Plan
from lowtide.ops.linear_cross_entropy.planning.remembered import keep, memory

ALIGNMENT = 16  # bytes; of tensor maps, and of Triton's vectors
PLAIN = (type(None), bool, int, float, str)

Signature = tuple[Hashable, ...]


class Entry:
    """Hold what was decided for a call."""

    def __init__(self, plan: Plan, needs_grad: tuple[bool, ...]) -> None:
        from lowtide.core.recording.recorded import Recorded, is_aligned  # imports Triton

        # True for input and weight if they get gradients; then False for bias and scale, which are
        # absent.
        self.plan, self.needs_grad = plan, needs_grad
        self.recorded, self.is_aligned = Recorded(self._compute), is_aligned

    def compute(self, *tensors: Tensor) -> Sequence[Tensor | None]:
        """Return the loss, and each gradient's tensor and remaining factor."""
        if self.is_aligned(tensors):
            return self.recorded(None, *tensors)
        with torch_private.below_autograd():
            return self._compute(*tensors)

    def _compute(self, input: Tensor, linear_weight: Tensor, target: Tensor) -> list[Tensor | None]:
        loss, gradients = ops.loss_and_gradients(self.plan, Head((input,), (linear_weight,)), Labels(target))
        assert gradients is not None
        found = [each for each in gradients.all if each is not None]
        return [loss, *(part for each in found for part in (each.tensor, each.remaining))]


# None for a call that goes by the operators.
_calls: dict[Hashable, Entry | None] = memory()


def signature(input: Any, linear_weight: Any, target: Any, *options: Any) -> Signature | None:
    """Return what tells calls apart, or None for a call that is not remembered.

    Each option is told apart by its type, too, since an error may depend on it: 1 is not True.
    """
    if torch.compiler.is_compiling() or torch_private.below_autograd is None:
        return None
    kinds = tuple(map(type, options))
    if not all(kind in PLAIN for kind in kinds):
        return None
    tensors = input, linear_weight, target
    if not all(map(_is_strided, tensors)) or linear_weight.dim() != 2:
        return None
    if not seen_by_nobody(tensors) or forward_ad._current_level >= 0:
        return None
    # In a checkpoint, a call that is computed again must save the same tensors.
    if torch_private.top_saved_tensors_hooks(True) is not None:
        return None
    device = input.device
    if torch.is_autocast_enabled(device.type):
        return None
    if (input.data_ptr() | linear_weight.data_ptr()) % ALIGNMENT:
        return None
    return (
        options, kinds, torch.is_grad_enabled(), device, linear_weight.device, target.device,
        input.shape, input.stride(), input.dtype, input.requires_grad,
        linear_weight.shape, linear_weight.stride(), linear_weight.dtype, linear_weight.requires_grad,
        target.shape, target.stride(), target.dtype, target.requires_grad,
    )  # fmt: skip


def _is_strided(operand: Any) -> bool:
    return isinstance(operand, Tensor) and operand.layout is torch.strided and not operand.is_nested


def run(known: Signature, input: Tensor, linear_weight: Tensor, target: Tensor) -> Tensor | None:
    """Return the loss, or None for a call that goes by the operators."""
    entry = _calls.get(known)
    if entry is None:
        return None
    return linear_cross_entropy.apply(entry, input, linear_weight, target)  # type: ignore[no-any-return]


def remember(known: Signature, input: Tensor, linear_weight: Tensor, target: Tensor, **options: Any) -> None:
    """Remember a call that has been run, if it has gradients and kernels of Triton compute it."""
    if known in _calls:
        return
    keep(_calls, known, _entry(Head((input,), (linear_weight,)), target, options))


def _entry(head: Head, target: Tensor, given: dict[str, Any]) -> Entry | None:
    options = Options.of(head.inputs[0], Arguments(**given))
    tracked = torch.is_grad_enabled()
    needs_grad = (*(tracked and each.requires_grad for each in (*head.inputs, *head.weights)), False, False)
    if options.reduction == "none" or not any(needs_grad) or head.by_position or target.requires_grad:
        return None
    if target.is_floating_point() or not head.classes:
        return None
    call_kind = ops.call_kind_of(head, target, None, needs_grad, log_probs=False)
    options = with_graph_facts(head, options, call_kind)
    if backend_of(options.engine) != "triton" or any(unreadable_operands(head, options, call_kind)):
        return None
    return Entry(make_plan(head, options, call_kind), needs_grad)


class linear_cross_entropy(torch.autograd.Function):
    """Compute the loss of a remembered call, and its gradients as the operator does.

    Profiles name its node after the class: as that of the operator.
    """

    @staticmethod
    def forward(ctx: Any, entry: Entry, input: Tensor, linear_weight: Tensor, target: Tensor) -> Tensor:
        with on_device_of(input):
            loss, *rest = entry.compute(input, linear_weight, target)
        assert loss is not None
        ctx.entry = entry
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input, linear_weight, target, *rest)
        return loss

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if grad_output is None:
            return (None,) * 4
        plan, needs_grad = ctx.entry.plan, ctx.entry.needs_grad
        input, linear_weight, target, *rest = ctx.saved_tensors
        head = Head((input,), (linear_weight,))
        found = differentiated_loss(head, Labels(target), plan.options, needs_grad, grad_output)
        if found is None:
            found = finish_gradients(rest, grad_output, head.tensors, needs_grad, plan.backend)
        return (None, *found[:2], None)
