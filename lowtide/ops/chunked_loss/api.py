"""Provide the public function of the chunked loss. Its docstring is the contract."""

import functools
import sys
from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from torch import Tensor

from lowtide.core.errors import advises
from lowtide.ops.chunked_loss import validation
from lowtide.ops.chunked_loss.functional.fsdp import gathered
from lowtide.ops.linear_cross_entropy.definition.validation import check_normalizer

Mode = Literal["gradient_in_forward", "recompute"]


INSTEAD_OF = dict.fromkeys(("chunks", "num_chunks", "n_chunks"), "pass chunk_size, a number of rows")
Aux = tuple[Tensor, dict[str, Any]]
"""The loss, and the sums beside it: tensors, or numbers where loss_fn returned numbers."""


@overload
def chunked_loss(
    loss_fn: Callable[..., Any],
    head: Callable[..., Any],
    hidden: Tensor | tuple[Tensor, ...],
    *token_tensors: Any,
    chunk_size: int | None = None,
    workspace: int | None = None,
    normalizer: float | Tensor | None = None,
    has_aux: Literal[False] = False,
    mode: Mode = "gradient_in_forward",
) -> Tensor: ...
@overload
def chunked_loss(
    loss_fn: Callable[..., Any],
    head: Callable[..., Any],
    hidden: Tensor | tuple[Tensor, ...],
    *token_tensors: Any,
    chunk_size: int | None = None,
    workspace: int | None = None,
    normalizer: float | Tensor | None = None,
    has_aux: Literal[True],
    mode: Mode = "gradient_in_forward",
) -> Aux: ...
@overload
def chunked_loss(
    loss_fn: Callable[..., Any],
    head: Callable[..., Any],
    hidden: Tensor | tuple[Tensor, ...],
    *token_tensors: Any,
    chunk_size: int | None = None,
    workspace: int | None = None,
    normalizer: float | Tensor | None = None,
    has_aux: bool,
    mode: Mode = "gradient_in_forward",
) -> Tensor | Aux: ...
@overload
def chunked_loss(
    loss_fn: Callable[..., Any],
    *,
    chunk_size: int | None = None,
    workspace: int | None = None,
    normalizer: float | Tensor | None = None,
    has_aux: Literal[False] = False,
    mode: Mode = "gradient_in_forward",
) -> Callable[..., Tensor]: ...
@overload
def chunked_loss(
    loss_fn: Callable[..., Any],
    *,
    chunk_size: int | None = None,
    workspace: int | None = None,
    normalizer: float | Tensor | None = None,
    has_aux: Literal[True],
    mode: Mode = "gradient_in_forward",
) -> Callable[..., Aux]: ...
@overload
def chunked_loss(
    *,
    chunk_size: int | None = ...,
    workspace: int | None = ...,
    normalizer: float | Tensor | None = ...,
    has_aux: Literal[False] = ...,
    mode: Mode = ...,
) -> Callable[[Callable[..., Any]], Callable[..., Tensor]]: ...
@overload
def chunked_loss(
    *,
    chunk_size: int | None = ...,
    workspace: int | None = ...,
    normalizer: float | Tensor | None = ...,
    has_aux: Literal[True],
    mode: Mode = ...,
) -> Callable[[Callable[..., Any]], Callable[..., Aux]]: ...
@advises(INSTEAD_OF, "pass (loss_fn, head, hidden, ...)")
def chunked_loss(
    loss_fn: Callable[..., Any] | None = None,
    head: Callable[..., Any] | None = None,
    hidden: Tensor | tuple[Tensor, ...] | None = None,
    *token_tensors: Any,
    chunk_size: int | None = None,
    workspace: int | None = None,
    normalizer: float | Tensor | None = None,
    has_aux: bool = False,
    mode: Mode = "gradient_in_forward",
) -> Any:
    r"""Compute any loss of any head a chunk of rows at a time, as one scalar in one graph.

    Example::

        def loss_fn(logits, labels):
            return F.cross_entropy(logits.float(), labels, reduction="sum")

        labels = tokens[:, 1:]
        count = (labels != -100).sum()
        loss = chunked_loss(loss_fn, model.lm_head, hidden[:, :-1], labels, normalizer=count)
        loss.backward()

    With the rows :math:`h_i` of `hidden` and :math:`t_i` of the token tensors, cut into chunks
    :math:`C`,

    .. math::
        L = \sum_C \mathrm{loss\_fn}\bigl(\mathrm{head}(h_C), t_C\bigr).

    This is :math:`\mathrm{loss\_fn}(\mathrm{head}(h), t)` if `loss_fn` is a sum over rows and no
    row's result depends on other rows. The result is an ordinary tensor, and every tensor that it
    depends on gets one ordinary gradient. Scale it (``loss / n``, ``loss *= f``, a scaler), call
    backward once or more often, or ask for single gradients.

    Without `loss_fn` it is a decorator: ``@chunked_loss(chunk_size=1024)`` makes a function of
    (head, hidden, \*token_tensors) from a loss function.

    Shapes:
        hidden [..., T, D], or a tuple of tensors [..., T, \*]; token tensors [..., T, \*]. `head`
        and `loss_fn` get them as [rows, D] and [rows, \*]. The result is 0-d, or [..., T] where
        `loss_fn` returns a value for each row (mode ``"recompute"``).

    Args:
        loss_fn: takes what `head` returned, then a chunk of each token tensor; returns the sum over
            its rows, a floating-point tensor.
        head: an nn.Module, a bound method of one, or a functools.partial with modules and tensors
            as arguments, in dictionaries and lists too: ``partial(F.linear, weight=weight)``. The
            same holds for `loss_fn`. Parameters are found there. A parameter that is reached only
            through a closure or a global is an error if it requires a gradient. Any parameter may
            be frozen, tied or adapted; one that no chunk reaches gets no gradient. With a bound
            method the whole module counts, so a trunk with batch statistics, or on another device,
            is an error. ``partial(logits, model.lm_head)`` leaves the trunk out.
        hidden: any strides; a shifted slice such as ``hidden[:, :-1]`` is not copied as a whole. A
            tuple is passed to `head` as several arguments.
        token_tensors: what is cut along the same rows: labels, weights, advantages, a teacher's
            hidden states. They may require gradients. Numbers, None and 0-d tensors are passed
            whole.
        chunk_size: rows at a time; 1024 if neither this nor `workspace` is given. Larger is faster
            until the products fill the device.
        workspace: bytes that a chunk may take; the number of rows follows from it. It is measured
            by running the first rows in chunks of growing size, and kept for as long as `head` and
            `loss_fn` live. Measuring calls `loss_fn`, and restores the generators' states. The
            result depends on shapes alone. Memory that an operator allocates for itself while it
            runs is not seen.
        normalizer: what the sum is divided by, as that of :func:`lowtide.linear_cross_entropy`: a
            number above 0 or a 0-d tensor, which takes no gradient. It does not change aux. An
            error where `loss_fn` returns a value for each row.
        has_aux: `loss_fn` returns (sum, dict of tensors or numbers). The dict's values are added up
            over chunks, detached; the result is (loss, dict).
        mode: ``"gradient_in_forward"`` forms the gradients while a chunk is in memory. Nothing is
            computed twice, and the gradients are held from forward to backward. ``"recompute"``
            computes each chunk again in backward: one more forward pass of the head, and no
            gradients held; `loss_fn` may return a value for each row.

    Precision:
        For half precision, sums over chunks (the loss, aux, gradients of parameters) are float32,
        and so is the loss.
        On CUDA, the product of an F.linear adds its weight gradient to that sum unrounded. Any
        other gradient of a half-precision parameter is rounded once for each chunk before it is
        added, as autograd computes it.
        Each gradient is rounded once at the end, and in ``"gradient_in_forward"`` once more if the
        upstream gradient is no power of two.
        For float16, each chunk's backward starts from a power of two that keeps its gradients in
        range, so that nothing underflows or overflows before a scaler sees it. Measuring it takes
        one more backward pass through `loss_fn`; through `head` as well, if that has parameters
        beside those of F.linear on CUDA, or returns an object that torch.utils._pytree does not
        look into. Where one of the two is compiled, it is measured on a chunk computed once more.
        On CUDA, an F.cross_entropy of float32 logits (a sum or a value a row, of classes, without
        weights or smoothing) reads the logits in one pass, in float32 like torch's.

    Memory:
        Beyond `hidden`, its gradient and those of the parameters: what one chunk takes for its own
        forward and backward. Half-precision parameters also have float32 sums, 4 bytes an element.
        Nothing of a chunk outlives it. Where a chunk draws random numbers on the CPU, its generator
        state takes 5 KB.

    Derivatives: those of higher order, torch.func's transforms and forward mode are exact, by
    recomputation chunk by chunk, of `chunk_size` rows; a workspace cannot be measured there. Pass
    parameters by a partial, as in ``partial(functional_call, head, parameters)``. Dropout has one
    mask, the forward pass's, if it uses torch's default generators; a generator of your own is not
    rewound. Under vmap there is one mask for all elements (``randomness="same"``).

    torch.compile breaks the graph here, runs this function eagerly, and goes on. DDP: pass
    ``model.module.head`` and call this in the model's forward, or outside of it. FSDP2: let `head`
    be one unit, or part of the unit whose forward calls this. Its parameters are then gathered once
    and their gradients reduced once, however many chunks there are, and no rank waits for another's
    chunks.

    Raises:
        ValueError, TypeError: in these cases; each is also a RuntimeError.
            Rows that disagree; tensors on several devices, or not dense (sparse, nested).
            A result that is no sum (a mean; a value a row, in ``"gradient_in_forward"``).
            Parameters in closures. Buffers that change in the loop. Batch normalisation with batch
            statistics.
            A value that changes before it is used again: labels in place, a frozen weight,
            ``head.eval()``, a constant in a closure or on a module. A change that cannot be seen is
            noticed by another loss, which on CUDA makes the gradients NaN instead.
            A call in which nothing needs a gradient, unless under torch.no_grad().

    Source: the loop is that of pytorch issue 124480 (detach, then ``loss.backward()`` for each
    chunk), which asks for one scalar that can be scaled.
    """
    options: dict[str, Any] = {
        "chunk_size": chunk_size,
        "workspace": workspace,
        "normalizer": normalizer,
        "has_aux": has_aux,
        "mode": mode,
    }
    if loss_fn is None:
        return functools.partial(chunked_loss, **options)
    if head is None:
        validation.check_options(loss_fn, callable, chunk_size, workspace, mode)
        return functools.wraps(loss_fn)(functools.partial(chunked_loss, loss_fn, **options))
    if torch.compiler.is_compiling() or "torch._dynamo" in sys.modules:
        from lowtide.ops.chunked_loss.uncompiled import run
    else:
        from lowtide.ops.chunked_loss.execute import run
    validation.check_options(loss_fn, head, chunk_size, workspace, mode)
    parts = hidden if isinstance(hidden, tuple) else (hidden,)
    leading = validation.check_rows(parts, token_tensors)
    check_normalizer(normalizer, "mean", parts[0])

    return gathered(head, parts, lambda parts: run(loss_fn, head, parts, token_tensors, leading, options))
