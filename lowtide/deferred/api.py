"""Define `defer_logits`, whose docstring is the contract, and its handle `Deferral`."""

import copyreg
import inspect
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from lowtide.core import torch_private
from lowtide.core.checks import check_workspace
from lowtide.core.errors import ArgumentError
from lowtide.deferred import einops_backend, operations, pytree
from lowtide.deferred.locate_head import check_head, check_model, classes, locate_head
from lowtide.deferred.proxies.counts import Counts
from lowtide.deferred.proxies.head_call import HeadCall
from lowtide.deferred.proxies.hidden import DeferredHidden, NotDeferred
from lowtide.deferred.recorded.sharded import transformers_forward
from lowtide.deferred.watch import Watch

__all__ = ["Deferral", "defer_logits", "operations", "pytree"]


class Deferral:
    """Count what a deferral of logits did, and undo it; `defer_logits` returns this handle.

    Attributes:
        head: the module whose logits are deferred.
        fused: the number of losses computed without logits, and of differentiable results of the
            rows that other losses are made of (`gather`, `logsumexp`, `sum`, `mean`).
        materialized: for each operation, how often it materialised the logits.

    Code compiled by torch.compile is counted each time it runs; a replay of a CUDA graph is not.
    """

    def __init__(self, model: nn.Module, head: nn.Module, workspace: int | None) -> None:
        self.head = head
        self._workspace = workspace
        self._counts = Counts()
        self._watch = Watch(model, head)
        self._plain = type(head)
        self._parallel = transformers_forward(head)
        einops_backend.register()
        self._class: type | None = _deferring(self._plain, self)
        head.__class__ = self._class
        # check_head refuses an instance's forward, except the class's own and the one in _parallel.
        vars(head).pop("forward", None)

    @property
    def fused(self) -> int:
        return self._counts.fused

    @property
    def materialized(self) -> dict[str, int]:
        return self._counts.materialized

    def __repr__(self) -> str:
        return f"Deferral(head={self._plain.__name__}, fused={self.fused}, materialized={self.materialized})"

    def undo(self) -> None:
        """Restore the head's class. A second call does nothing."""
        if self._class is None:
            return
        self._watch.end()
        own = vars(self.head).get("forward")
        if own == MethodType(self._class.forward, self.head):  # type: ignore[attr-defined]
            del self.head.forward  # Hooks leave this attribute when they are removed.
        if type(self.head) is self._class:
            self.head.__class__ = self._plain
        else:  # Another class was derived from the deferred one; fully_shard does so.
            for name in ("forward", "__reduce_ex__", "lowtide_deferral"):
                delattr(self._class, name)
        self._class = None
        if self._parallel is not None:
            self.head.forward = self._parallel

    def __enter__(self) -> "Deferral":
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def _deferring(plain: type, deferral: Deferral) -> type:
    parameters = inspect.signature(plain.forward).parameters.values()  # type: ignore[attr-defined]
    placed = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    names = {*placed[1:2], "input"}  # of the hidden states; self comes before

    def eager(self: Any, *args: Any, **kwargs: Any) -> Any:
        if deferral._parallel is not None:
            return deferral._parallel(*args, **kwargs)
        return plain.forward(self, *args, **kwargs)  # type: ignore[attr-defined]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not args:
            args = tuple(kwargs.pop(name) for name in names & kwargs.keys())
        # A hook may still call this after undo().
        floating = len(args) > 0 and isinstance(args[0], Tensor) and args[0].is_floating_point()
        if deferral._class is None or not self.training or not floating:
            return eager(self, *args, **kwargs)
        if torch.is_grad_enabled():
            deferral._watch.called = True
        if not torch.compiler.is_compiling():
            einops_backend.register()
        counts, reason = deferral._counts, _reason_against(self)
        if reason is None:
            hidden = DeferredHidden(args[0], HeadCall(counts, deferral._workspace, classes(self)))
            try:
                return hidden.returned(plain.forward(self, hidden, *args[1:], **kwargs))  # type: ignore[attr-defined]
            except NotDeferred as refused:
                reason = str(refused)
        return eager(self, counts.on(args[0], reason), *args[1:], **kwargs)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        """Reduce to the plain class: a copy is not deferred, and a pickle loads without lowtide."""
        reduced: Any = plain.__reduce_ex__(self, protocol)  # type: ignore[call-arg]
        function, arguments, *rest = reduced
        # pickle allows __newobj__ only for the object's own class.
        if function.__name__ == "__newobj__":
            function, arguments = copyreg._reconstructor, (plain, object, None)  # type: ignore[attr-defined]
        return function, tuple(plain if each is type(self) else each for each in arguments), *rest

    body = {"forward": forward, "__reduce_ex__": __reduce_ex__, "lowtide_deferral": deferral}
    return type(f"Deferred{plain.__name__}", (plain,), body | {"__module__": plain.__module__})


def _reason_against(head: nn.Module) -> str | None:
    """Return what needs real logits in this call of the head, or None if nothing does."""
    everywhere = (modules._global_backward_hooks, modules._global_backward_pre_hooks)
    if any((head._backward_hooks, head._backward_pre_hooks, *everywhere)):
        return "a backward hook of the head"
    if torch.compiler.is_compiling() and not torch_private.TRACES_PROPERTIES:
        return "torch.compile before torch 2.11"
    return None


def defer_logits(
    model: nn.Module, *, head: nn.Module | None = None, workspace: int | None = None
) -> Deferral:
    """Compute the model's losses without logits; the model's own code stays unmodified.

    The deferral is active in training mode only. It also covers a training loop that computes the
    loss outside the model.

    The head's class is replaced by a subclass of it. In training mode the subclass's `forward`
    returns a small object instead of the logits z = x W^T + b [..., V]. The object knows its shape,
    dtype and device. It records

    * arithmetic: scale, division, tanh (so soft caps), casts, `+ b` [V], another product of the
      same rows (LoRA), softmax and log-softmax, exp, and sums and products of these;
    * selection and layout: views, rows by any index or mask, ranges of classes, transpositions.

    The operator of :func:`lowtide.linear_cross_entropy` computes the loss in `F.cross_entropy`
    (class indices or probabilities, weight, label_smoothing, ignore_index, any reduction; class
    dimension last or second), in :class:`torch.nn.CrossEntropyLoss`, and in `F.nll_loss` of a
    log-softmax. The operator would compute some heads in fewer digits than torch (a float32 adapter
    beside a bfloat16 head, float64), and others not at all (a vector added after a scale, a product
    with a vector). The loss of these heads is computed from the recorded operations, one chunk of
    rows at a time.

    These are computed in chunks as well: `logsumexp`, `gather`, `log_softmax` + `gather`, `argmax`,
    `max`, `topk`, and `sum` and `mean` over the classes (and rows, but not rows alone). Where it
    supports the head, the operator of :func:`lowtide.linear_log_probs` computes `logsumexp`,
    `softmax` or `log_softmax` + `gather`, and entropies (the sum of p log p, or of p z, over the
    classes). It takes one pass for log-probabilities and what is asked for after them. The sum of
    log p is a loss by the operator of the loss.

    `F.kl_div` of a student's log-softmax and a teacher that needs no gradient takes the operator of
    :func:`lowtide.distillation.forward_kl` if the teacher's logits are deferred too, at the same
    temperature, and else that of the loss for the gradient, and chunks for the value. With
    ``reduction="none"``, and for a head that is divided over ranks, the logits become real.

    Any other operation materialises the logits once, exactly as the model would have computed them
    (in the chunks' order of additions if values have been picked from chunks before), and gives one
    :class:`RealLogitsWarning` that names the operation.

    Operands keep the values that they had when they were recorded. A number, or a vector [V], is
    copied. Hidden states and weight are shared; it is an error to use the logits after one of these
    has been changed in place.

    Args:
        model: any module, bare or within DistributedDataParallel, FSDP2 or torch.compile.
        head: the module whose `forward` multiplies hidden states, its first argument, by a weight
            [V, D]. None takes the model's `get_output_embeddings()` (Transformers); without one,
            the only :class:`torch.nn.Linear` with as many outputs as an embedding of the model has
            rows.
        workspace: bytes that each fused loss may hold beyond hidden states, weight, results and
            gradients. None takes the default of :func:`lowtide.linear_cross_entropy`. A loss that
            is computed in chunks also holds the sum of the weight's gradient.

    Returns:
        A :class:`Deferral`, which counts what is computed without logits. Call its `undo()`, or use
        it as a context manager.

    Warns:
        HeadNotCalledWarning: once, if an optimizer has stepped twice over the head's parameters and
            the head has never been called in training; or if the head is no longer a module of the
            model (`resize_token_embeddings` makes a new one).

    Unchanged: parameters and state_dict, hooks, `isinstance`, tied weights,
    torch.compile(fullgraph=True). A copy or a pickle of the model is the plain model. Logits are
    real in eval mode (`generate`, a Trainer's evaluation) and for a head with backward hooks. No
    name of torch or of another library is patched.

    Precision: that of the operators. Products are summed in float32, so half-precision logits are
    not rounded, and their loss, logsumexp, sum of p z and picked log-probabilities are float32.
    Other results have torch's dtypes, under the autocast that was on when the head was called.

    Memory: O(workspace), never N V. Hidden states and weight live as long as the logits do.

    Raises:
        ValueError, TypeError: for a workspace that is not a positive int; no linear head, or more
            than one; a head that is not the model's own; a head that is deferred already; a
            `forward` replaced on the instance; a head that DeepSpeed ZeRO-3 partitions. Also when a
            loss is computed, if the workspace does not hold one row of logits; the message says how
            many bytes a row takes.
        RuntimeError: when logits are used,
            * if the weight has been freed since (FSDP2 resharded the head after its forward: the
              message says what to set);
            * if hidden states or weight have been changed in place since (an optimizer's step),
              which only eager code can see;
            * for an in-place change of logits that other deferred logits share memory with, if the
              two have been materialised separately before;
            * for `register_hook` and `retain_grad`: the loss does not go through these logits;
            * for logits passed to an :class:`torch.autograd.Function`, or read by
              `torch.as_tensor`, which would lose their gradient (pass `logits.materialize()`);
            * for logits that leave an autograd.Function (a reentrant checkpoint) where gradients
              are on, or that a transform of torch.func takes or returns.

    Limits: `isinstance(logits, torch.Tensor)` is False. Code that multiplies by the head's `weight`
    itself never calls the head, and `deferral.fused` stays 0. A change of a weight through its
    `.data` is noticed only in the step of a :class:`torch.optim.Optimizer`: it leaves the
    version counter as it is, as everywhere in torch.

    Example::

        lowtide.defer_logits(model)
        loss = model(input_ids, labels=labels).loss  # the model's own code, no logits
        loss.backward()
    """
    check_model(model, head)
    head = locate_head(model) if head is None else head
    check_head(head)
    check_workspace(workspace)
    if workspace is not None and workspace <= 0:
        raise ArgumentError(f"workspace must be a number of bytes above 0, or None, got {workspace}")
    return Deferral(model, head, workspace)
