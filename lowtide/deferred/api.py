"""defer_logits: one line, any model. Its docstring is the contract."""

import copyreg
import warnings
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from lowtide.deferred import elementwise, functions, rows
from lowtide.deferred.find import check_head, check_model, classes, find_head
from lowtide.deferred.hidden import DeferredHidden, NotDeferred
from lowtide.deferred.logits import Source, user_stacklevel

__all__ = ["Deferral", "RealLogitsWarning", "defer_logits", "elementwise", "functions", "rows"]


class RealLogitsWarning(UserWarning):
    """An operation has made real logits of deferred ones."""


class Deferral:
    """What `defer_logits` returns: the way back, and a count of what happened.

    Attributes:
        head: the module whose logits are deferred.
        fused: how many losses have been computed without logits.
        materialized: by operation, how often real logits were made for it.

    Counts are of eager code; what torch.compile compiles does not count.
    """

    def __init__(self, head: nn.Module) -> None:
        self.head = head
        self.fused = 0
        self.materialized: dict[str, int] = {}
        self._plain = type(head)
        self._class: type | None = _deferring(self._plain, self)
        head.__class__ = self._class
        vars(head).pop("forward", None)  # the plain class's own, or check_head had refused it

    def __repr__(self) -> str:
        return f"Deferral(head={self._plain.__name__}, fused={self.fused}, materialized={self.materialized})"

    def undo(self) -> None:
        """The head is again as it was. A second call does nothing."""
        if self._class is None:
            return
        own = vars(self.head).get("forward")
        if own == MethodType(self._class.forward, self.head):  # type: ignore[attr-defined]
            del self.head.forward  # of hooks that came and went in between
        if type(self.head) is self._class:
            self.head.__class__ = self._plain
        else:  # somebody has made a class of this one: fully_shard does
            for name in ("forward", "__reduce_ex__", "lowtide_deferral"):
                delattr(self._class, name)
        self._class = None

    def __enter__(self) -> "Deferral":
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def _count_fused(self) -> None:
        if not torch.compiler.is_compiling():
            self.fused += 1

    def _report(self, operation: str) -> None:
        if torch.compiler.is_compiling():
            return
        self.materialized[operation] = self.materialized.get(operation, 0) + 1
        if self.materialized[operation] == 1:
            warnings.warn(
                f"{operation} needs real logits: they are made, exactly, in the memory that they take. "
                "What needs none: help(lowtide.defer_logits). If real ones are wanted here, call the head in "
                "eval mode for them (head.eval(), then head.train()), or undo() the deferral",
                RealLogitsWarning,
                stacklevel=user_stacklevel(),
            )


def _deferring(plain: type, deferral: Deferral) -> type:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not args and "input" in kwargs:
            args = (kwargs.pop("input"),)
        # Undone, it may still be what a hook calls.
        if deferral._class is None or not args or not _defers(self, args[0]):
            return plain.forward(self, *args, **kwargs)  # type: ignore[attr-defined]
        if _has_backward_hooks(self):
            deferral._report("a backward hook of the head")
            return plain.forward(self, *args, **kwargs)  # type: ignore[attr-defined]
        source = Source(deferral._report, deferral._count_fused)
        hidden = DeferredHidden(args[0], classes(self), source, torch.is_grad_enabled())
        try:
            logits = plain.forward(self, hidden, *args[1:], **kwargs)  # type: ignore[attr-defined]
        except NotDeferred as reason:
            deferral._report(str(reason))
            return plain.forward(self, *args, **kwargs)  # type: ignore[attr-defined]
        return logits.tensor if isinstance(logits, DeferredHidden) else logits

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        """A copy or a pickle is of the plain class: it is not deferred, and loads without this package."""
        reduced: Any = plain.__reduce_ex__(self, protocol)  # type: ignore[call-arg]
        function, arguments, *rest = reduced
        if function.__name__ == "__newobj__":  # which pickle allows of an object's own class alone
            function, arguments = copyreg._reconstructor, (plain, object, None)  # type: ignore[attr-defined]
        return function, tuple(plain if each is type(self) else each for each in arguments), *rest

    body = {"forward": forward, "__reduce_ex__": __reduce_ex__, "lowtide_deferral": deferral}
    return type(f"Deferred{plain.__name__}", (plain,), body | {"__module__": plain.__module__})


def _has_backward_hooks(head: nn.Module) -> bool:
    everywhere = (modules._global_backward_hooks, modules._global_backward_pre_hooks)
    return any((head._backward_hooks, head._backward_pre_hooks, *everywhere))


def _defers(head: nn.Module, input: object) -> bool:
    if not head.training or not isinstance(input, Tensor) or not input.is_floating_point():
        return False
    # Reentrant checkpointing runs without gradients first: logits made then must not be taken for the real
    # ones.
    return torch.is_grad_enabled() or not input.requires_grad


def defer_logits(model: nn.Module, *, head: nn.Module | None = None) -> Deferral:
    """From here on the model's losses are computed without its logits: by its own, unmodified code, and by
    the training loop around it, in training mode alone.

    The head's class is swapped for a subclass of it whose `forward`, in training mode, returns a small
    object instead of logits z = x W^T + b [..., V]. That knows its shape, dtype and device, and records

    * what is done to its numbers: scale, division, tanh (so soft caps), casts, `+ b` [V], another product
      of the same rows (LoRA), softmax and log-softmax, exp, sums and products of such;
    * which it still has: views, rows by any index or mask, ranges of classes, transpositions.

    It becomes a loss, by the operator of :func:`lowtide.linear_cross_entropy`, in `F.cross_entropy`
    (class indices or probabilities, weight, label_smoothing, ignore_index, any reduction; class dimension
    last or second), :class:`torch.nn.CrossEntropyLoss`, and `F.nll_loss` of a log-softmax. `logsumexp`,
    `gather`, `log_softmax` + `gather` (by that of :func:`lowtide.linear_log_probs`), `argmax`, `max`, `topk`,
    `sum` and `mean` over the classes run a chunk of rows at a time, with gradients. Anything else makes
    real logits, once, exactly as the model would have, and gives one :class:`RealLogitsWarning` that names
    the operation.

    Args:
        model: any module, bare or within DistributedDataParallel, FSDP2 or torch.compile.
        head: the module whose `forward` multiplies hidden states, its first argument, by a weight [V, D].
            None asks the model for it (`get_output_embeddings()`, of Transformers); failing that it is the
            one :class:`torch.nn.Linear` with as many outputs as an embedding of the model has rows.

    Returns:
        :class:`Deferral`, to `undo()` it, or to be used as a context manager. It counts what was fused.

    Unharmed: parameters and state_dict, hooks, `isinstance`, tied weights, torch.compile(fullgraph=True). A
    copy or a pickle of the model is the plain model. In eval mode (`generate`, a Trainer's evaluation) and
    for a head with backward hooks logits are real. No name of torch or of any library is patched.

    Precision: that of the operators: products summed in float32, so that half-precision logits are not
    rounded; the loss is float32 then. Dtypes are those of autocast where the head was called.

    Memory: O(workspace) of :func:`lowtide.linear_cross_entropy`, never N V. Hidden states and weight live as
    long as the logits do.

    Raises:
        ValueError, TypeError: no linear head; more than one; a head that is not the model's own; deferred
            already; a `forward` replaced on the instance; a head that DeepSpeed ZeRO-3 partitions.
        RuntimeError: when logits are used, if the weight has been freed since (FSDP2 resharded the head after
            its forward: the message says what to set) or hidden states or weight have been changed in place
            since (an optimizer's step), which only eager code can see; for an in-place change of logits that
            others depend on; for `register_hook` and `retain_grad` of logits, which the loss does not go
            through; for logits passed to an :class:`torch.autograd.Function`, which would lose their gradient
            (pass `logits.materialize()`).

    Not seen: `isinstance(logits, torch.Tensor)` is False. Code that takes the head's `weight` and
    multiplies by itself never calls the head: `deferral.fused` stays 0.

    Example::

        lowtide.defer_logits(model)
        loss = model(input_ids, labels=labels).loss  # the model's own code, no logits
        loss.backward()
    """
    check_model(model, head)
    found = find_head(model) if head is None else head
    check_head(found)
    return Deferral(found)
