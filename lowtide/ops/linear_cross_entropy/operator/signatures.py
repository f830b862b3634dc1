"""Remember calls by what tells them apart, and find out whether a call is like one of them.

Shapes: N tokens, D features, V classes.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lowtide.core import torch_private
from lowtide.core.operator import seen_by_nobody
from lowtide.core.strides import aligned
from lowtide.ops.linear_cross_entropy.definition.head import Arguments, Options, Tensors
from lowtide.ops.linear_cross_entropy.operator.autograd import call_now
from lowtide.ops.linear_cross_entropy.operator.planner import make_plan, unreadable_operands, with_copies
from lowtide.ops.linear_cross_entropy.planning.call import backend_of
from lowtide.ops.linear_cross_entropy.planning.operands import needs_aligned_copies
from lowtide.ops.linear_cross_entropy.planning.remembered import keep, memory

if TYPE_CHECKING:
    from lowtide.ops.linear_cross_entropy.operator.remembered_call import RememberedCall

ALIGNMENT = 16  # bytes; of tensor maps, and of Triton's vectors
PLAIN = frozenset({type(None), bool, int, float, str})

Signature = tuple[Hashable, ...]


class AlignedCall:
    """Hold the options of a call some of whose operands GEMMs read slowly.

    The call runs as that of their copies does, which is remembered by itself.
    """

    def __init__(self, options: dict[str, Any], *, log_probs: bool) -> None:
        self.options, self.log_probs = options, log_probs

    def is_current(self) -> bool:
        return True

    def run(self, tensors: Tensors) -> Sequence[Tensor] | None:
        """Return the results; None if the call of the copies goes by the operators."""
        dtype = Options.of(tensors.input, Arguments(**self.options)).compute_dtype
        input = aligned(tensors.input, dtype, of_input=True)
        copied = tensors._replace(input=input, linear_weight=aligned(tensors.linear_weight, dtype))
        known = signature(copied, self.log_probs, *self.options.values())
        remember(known, copied, log_probs=self.log_probs, **self.options)
        return run(known, copied)


# None for a call that goes by the operators.
_calls: "dict[Hashable, RememberedCall | AlignedCall | None]" = memory()


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
    if not PLAIN.issuperset(kinds):
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
    begins, cast = None, None
    if (input.data_ptr() | linear_weight.data_ptr()) % ALIGNMENT:
        begins = input.data_ptr() % ALIGNMENT, linear_weight.data_ptr() % ALIGNMENT
    if torch.is_autocast_enabled(input.device.type):
        cast = torch.get_autocast_dtype(input.device.type)
    present = tuple([each is not None for each in others])
    layouts = [(each.shape, each.stride(), each.dtype, each.device, each.requires_grad) for each in given]
    return (options, kinds, torch.is_grad_enabled(), begins, cast, present, *layouts)


def _is_strided(operand: Any) -> bool:
    return isinstance(operand, Tensor) and operand.layout is torch.strided and not operand.is_nested


def through(
    operands: tuple[Tensor, Tensor, Tensor],
    options: dict[str, Any],
    compute: Callable[[], Sequence[Tensor]],
    *,
    log_probs: bool = False,
) -> Sequence[Tensor]:
    """Return the results of this rank's part of a call: by `compute` unless it is remembered.

    The operands are input, linear_weight and target; the options are all other arguments, by name.
    """
    others = {name: options[name] for name in Tensors._fields if name in options}
    tensors = Tensors(*operands, **others)
    given = {name: each for name, each in options.items() if name not in others}
    plain = [each for name, each in given.items() if name != "shard"]
    known = signature(tensors, log_probs, *plain, *given["shard"])
    found = run(known, tensors)
    if found is not None:
        return found
    results = compute()
    remember(known, tensors, log_probs=log_probs, **given)
    return results


def run(known: Signature | None, tensors: Tensors) -> Sequence[Tensor] | None:
    """Return the results, or None for a call that goes by the operators, as without a signature."""
    entry = None if known is None else _calls.get(known)
    if entry is None:
        return None
    if not entry.is_current():
        _calls.pop(known, None)  # another thread may have done so
        return None
    return entry.run(tensors)


def remember(known: Signature | None, tensors: Tensors, *, log_probs: bool = False, **options: Any) -> None:
    """Remember a call that has been run, if it has a signature and kernels of Triton compute it."""
    if log_probs:
        options["reduction"] = "none"
    if known is not None and known not in _calls:
        keep(_calls, known, _entry(tensors, options, log_probs=log_probs))


def _entry(
    tensors: Tensors, given: dict[str, Any], *, log_probs: bool
) -> "RememberedCall | AlignedCall | None":
    head, target, device = tensors.head, tensors.target, tensors.input.device
    options = Options.of(tensors.input, Arguments(**given))
    others = [each for each in tensors[2:] if isinstance(each, Tensor)]
    labels = [each for each in (target, *tensors[5:]) if each is not None]
    if any(each.device != device for each in others) or any(each.requires_grad for each in labels):
        return None
    if target.is_floating_point() or not head.classes:
        return None
    if needs_aligned_copies(head, options):
        return None if options.sharded else AlignedCall(given, log_probs=log_probs)
    call = call_now(head, tensors.labels, options, log_probs=log_probs)
    if backend_of(call.options.engine) != "triton":
        return None
    copied = unreadable_operands(call)
    plan = make_plan(call._replace(head=with_copies(head, copied)))
    decided = plan, copied, tensors.scale_number
    if options.sharded:
        from lowtide.ops.linear_cross_entropy.operator.remembered_call_of_ranks import RememberedCallOfRanks

        return RememberedCallOfRanks(*decided, tensors)
    from lowtide.ops.linear_cross_entropy.operator.remembered_call import RememberedCall

    return RememberedCall(*decided)
