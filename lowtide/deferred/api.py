"""defer_logits: one line, any model. Its docstring is the contract."""

import copyreg
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from lowtide.deferred import elementwise, indexing, pytree, reductions
from lowtide.deferred.counting import Counts
from lowtide.deferred.hidden import DeferredHidden, NotDeferred
from lowtide.deferred.locate_head import check_head, check_model, classes, find_head
from lowtide.deferred.logits import Source
from lowtide.deferred.steps import Watch

__all__ = ["Deferral", "defer_logits", "elementwise", "indexing", "pytree", "reductions"]


class Deferral:
    """What `defer_logits` returns: the way back, and a count of what happened.

    Attributes:
        head: the module whose logits are deferred.
        fused: how many losses have been computed without logits.
        materialized: by operation, how often real logits were made for it.

    What torch.compile has compiled counts when it runs; what a CUDA graph replays does not.
    """

    def __init__(self, model: nn.Module, head: nn.Module) -> None:
        self.head = head
        self._counts = Counts()
        self._watch = Watch(model, head)
        self._plain = type(head)
        self._class: type | None = _deferring(self._plain, self)
        head.__class__ = self._class
        vars(head).pop("forward", None)  # the plain class's own, or check_head had refused it

    @property
    def fused(self) -> int:
        return self._counts.fused

    @property
    def materialized(self) -> dict[str, int]:
        return self._counts.materialized

    def __repr__(self) -> str:
        return f"Deferral(head={self._plain.__name__}, fused={self.fused}, materialized={self.materialized})"

    def undo(self) -> None:
        """The head is again as it was. A second call does nothing."""
        if self._class is None:
            return
        self._watch.end()
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


def _deferring(plain: type, deferral: Deferral) -> type:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not args and "input" in kwargs:
            args = (kwargs.pop("input"),)
        # Undone, it may still be what a hook calls.
        if deferral._class is None or not args or not _defers(self, args[0]):
            return plain.forward(self, *args, **kwargs)  # type: ignore[attr-defined]
        if torch.is_grad_enabled():
            deferral._watch.called = True
        counts, reason = deferral._counts, _reason_against(self)
        if reason is None:
            hidden = DeferredHidden(args[0], classes(self), Source(counts), torch.is_grad_enabled())
            try:
                logits = plain.forward(self, hidden, *args[1:], **kwargs)  # type: ignore[attr-defined]
                return logits.tensor if isinstance(logits, DeferredHidden) else logits
            except NotDeferred as refused:
                reason = str(refused)
        return plain.forward(self, counts.on(args[0], reason), *args[1:], **kwargs)  # type: ignore[attr-defined]

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        """A copy or a pickle is of the plain class: it is not deferred, and loads without this package."""
        reduced: Any = plain.__reduce_ex__(self, protocol)  # type: ignore[call-arg]
        function, arguments, *rest = reduced
        if function.__name__ == "__newobj__":  # which pickle allows of an object's own class alone
            function, arguments = copyreg._reconstructor, (plain, object, None)  # type: ignore[attr-defined]
        return function, tuple(plain if each is type(self) else each for each in arguments), *rest

    body = {"forward": forward, "__reduce_ex__": __reduce_ex__, "lowtide_deferral": deferral}
    return type(f"Deferred{plain.__name__}", (plain,), body | {"__module__": plain.__module__})


def _reason_against(head: nn.Module) -> str | None:
    """Return what needs real logits of this call of the head; None if nothing does."""
    everywhere = (modules._global_backward_hooks, modules._global_backward_pre_hooks)
    if any((head._backward_hooks, head._backward_pre_hooks, *everywhere)):
        return "a backward hook of the head"
    return None


def _defers(head: nn.Module, input: object) -> bool:
    return head.training and isinstance(input, Tensor) and input.is_floating_point()


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
    last or second), :class:`torch.nn.CrossEntropyLoss`, and `F.nll_loss` of a log-softmax. What that operator
    would compute in fewer digits than torch (a float32 adapter beside a bfloat16 head, float64), or cannot
    (a vector behind a scale, a product with a vector), becomes a loss a chunk of rows at a time, by the
    recorded operations. So do `logsumexp`, `gather`, `log_softmax` + `gather` (where it can, by the operator
    of :func:`lowtide.linear_log_probs`), `argmax`, `max`, `topk`, `sum` and `mean` over the classes. Anything
    else makes real logits, once, exactly as the model would have, and gives one :class:`RealLogitsWarning`
    that names the operation.

    Operands are those of their time: a number, or a number a class, is copied when it is recorded; hidden
    states and weight are shared, and an error if they have been changed in place since.

    Args:
        model: any module, bare or within DistributedDataParallel, FSDP2 or torch.compile.
        head: the module whose `forward` multiplies hidden states, its first argument, by a weight [V, D].
            None asks the model for it (`get_output_embeddings()`, of Transformers); failing that it is the
            one :class:`torch.nn.Linear` with as many outputs as an embedding of the model has rows.

    Returns:
        :class:`Deferral`, to `undo()` it, or to be used as a context manager. It counts what was fused. If an
        optimizer steps twice over the head's parameters and the head has never been called in training,
        one :class:`HeadNotCalledWarning` says so.

    Unharmed: parameters and state_dict, hooks, `isinstance`, tied weights, torch.compile(fullgraph=True). A
    copy or a pickle of the model is the plain model. In eval mode (`generate`, a Trainer's evaluation) and
    for a head with backward hooks logits are real. No name of torch or of any library is patched.

    Precision: that of the operators: products summed in float32, so that half-precision logits are not
    rounded; the loss, logsumexp and log-probabilities that are picked are float32 then. Other dtypes are
    torch's own, with autocast as it was where the head was called.

    Memory: O(workspace) of :func:`lowtide.linear_cross_entropy`, never N V. Hidden states and weight live as
    long as the logits do.

    Raises:
        ValueError, TypeError: no linear head; more than one; a head that is not the model's own; deferred
            already; a `forward` replaced on the instance; a head that DeepSpeed ZeRO-3 partitions.
        RuntimeError: when logits are used, if the weight has been freed since (FSDP2 resharded the head after
            its forward: the message says what to set) or hidden states or weight have been changed in place
            since (an optimizer's step), which only eager code can see; for an in-place change of logits that
            others depend on; for `register_hook` and `retain_grad` of logits, which the loss does not go
            through; for logits passed to an :class:`torch.autograd.Function`, or read by `torch.as_tensor`,
            which would lose their gradient (pass `logits.materialize()`); for logits that leave an
            autograd.Function (a reentrant checkpoint) or a transform of torch.func.

    Not seen: `isinstance(logits, torch.Tensor)` is False. Code that takes the head's `weight` and
    multiplies by itself never calls the head: `deferral.fused` stays 0. A weight that is changed through its
    `.data` has the version that it had, as everywhere in torch.

    Example::

        lowtide.defer_logits(model)
        loss = model(input_ids, labels=labels).loss  # the model's own code, no logits
        loss.backward()
    """
    check_model(model, head)
    found = find_head(model) if head is None else head
    check_head(found)
    return Deferral(model, found)
