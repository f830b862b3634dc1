"""The public entry point of the generic chunked loss. Its docstring is the contract."""

import functools
import sys
from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from torch import Tensor

from lowtide.ops.chunked_loss import validation
from lowtide.ops.chunked_loss.functional import gathered

Mode = Literal["gradient_in_forward", "recompute"]


Aux = tuple[Tensor, dict[str, Any]]
"""The loss, and what was added up beside it: tensors, or numbers where loss_fn returned numbers."""


@overload
def chunked_loss(
    loss_fn: Callable[..., Any],
    head: Callable[..., Any],
    hidden: Tensor | tuple[Tensor, ...],
    *token_tensors: Any,
    chunk_size: int | None = None,
    workspace: int | None = None,
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
    has_aux: bool,
    mode: Mode = "gradient_in_forward",
) -> Tensor | Aux: ...
@overload
def chunked_loss(
    loss_fn: Callable[..., Any],
    *,
    chunk_size: int | None = None,
    workspace: int | None = None,
    has_aux: Literal[False] = False,
    mode: Mode = "gradient_in_forward",
) -> Callable[..., Tensor]: ...
@overload
def chunked_loss(
    loss_fn: Callable[..., Any],
    *,
    chunk_size: int | None = None,
    workspace: int | None = None,
    has_aux: Literal[True],
    mode: Mode = "gradient_in_forward",
) -> Callable[..., Aux]: ...
@overload
def chunked_loss(
    *,
    chunk_size: int | None = None,
    workspace: int | None = None,
    has_aux: Literal[False] = False,
    mode: Mode = "gradient_in_forward",
) -> Callable[[Callable[..., Any]], Callable[..., Tensor]]: ...
@overload
def chunked_loss(
    *,
    chunk_size: int | None = None,
    workspace: int | None = None,
    has_aux: Literal[True],
    mode: Mode = "gradient_in_forward",
) -> Callable[[Callable[..., Any]], Callable[..., Aux]]: ...
def chunked_loss(
    loss_fn: Callable[..., Any] | None = None,
    head: Callable[..., Any] | None = None,
    hidden: Tensor | tuple[Tensor, ...] | None = None,
    *token_tensors: Any,
    chunk_size: int | None = None,
    workspace: int | None = None,
    has_aux: bool = False,
    mode: Mode = "gradient_in_forward",
) -> Any:
    r"""Compute any loss of any head, a few rows at a time: one scalar in one graph, one chunk of
    logits in memory.

    Example::

        def loss_fn(logits, labels):
            return F.cross_entropy(logits.float(), labels, reduction="sum")

        loss = chunked_loss(loss_fn, model.lm_head, hidden[:, :-1], tokens[:, 1:], chunk_size=1024)
        loss = loss / (tokens[:, 1:] != -100).sum()
        loss.backward()

    With the rows :math:`h_i` of `hidden` and :math:`t_i` of the token tensors, cut into chunks :math:`C`,

    .. math::
        L = \sum_C \mathrm{loss\_fn}\bigl(\mathrm{head}(h_C), t_C\bigr),

    which is :math:`\mathrm{loss\_fn}(\mathrm{head}(h), t)` where `loss_fn` is a sum over rows, and no
    row's result depends on other rows. Scale the result as you like (``loss / n``, ``loss *= f``, a
    scaler), call backward once or more often, ask for single gradients: it is an ordinary tensor, and
    every tensor that it depends on gets one ordinary gradient.

    Without `loss_fn` it is a decorator: ``@chunked_loss(chunk_size=1024)`` makes a function of (head,
    hidden, \*token_tensors) of a loss function.

    Shapes:
        hidden [..., T, D], or a tuple of tensors [..., T, \*]; token tensors [..., T, \*]. `head` and
        `loss_fn` see them as [rows, D] and [rows, \*]. The result is 0-d, or [..., T] where `loss_fn`
        returns a value for each row (mode ``"recompute"``).

    Args:
        loss_fn: gets what `head` gave, then a chunk of each token tensor; returns the sum over its rows.
        head: an nn.Module, a bound method of one, or a functools.partial with modules and tensors as
            arguments, in dictionaries and lists too: ``partial(F.linear, weight=weight)``. The same goes for
            `loss_fn`. Parameters are found there; one that is reached only through a closure or a global is
            an error if it requires a gradient. Anything may be frozen, tied, adapted; one that no chunk
            reaches gets no gradient. Of a method the whole module counts, so that a trunk with batch
            statistics, or on another device, is an error: ``partial(logits, model.lm_head)`` leaves it out.
        hidden: any strides; a shifted slice such as ``hidden[:, :-1]`` is not copied as a whole. A tuple
            is given to `head` as several arguments.
        token_tensors: what is cut along the same rows: labels, weights, advantages, a teacher's hidden
            states. They may require gradients. Numbers, None and 0-d tensors are passed whole.
        chunk_size: rows at a time, 1024 if neither this nor `workspace` is given. Larger is faster until
            the products fill the device.
        workspace: bytes that a chunk may take, instead of a number of rows, which is then measured by
            running the first rows in chunks of growing size (with the generators' states restored, but
            `loss_fn` is called), and kept for as long as `head` and `loss_fn` live. It depends on shapes
            alone. What an operator takes for itself while it runs is not seen.
        has_aux: `loss_fn` returns (sum, dict of tensors or numbers). Its values are added up over chunks,
            detached; the result is (loss, dict).
        mode: ``"gradient_in_forward"`` forms the gradients while a chunk is in memory: nothing is
            computed twice, and the gradients are held from forward to backward. ``"recompute"`` computes
            each chunk again in backward: one more forward pass of the head, nothing held, and `loss_fn`
            may return a value for each row.

    Precision:
        Sums over chunks are kept in float32 for half precision (the loss, aux, gradients of parameters),
        and the loss is then float32. On CUDA the weight's gradient of an F.linear is added to that sum by
        the product itself, unrounded; any other gradient of a half-precision parameter is rounded once a
        chunk before it is added, as autograd gives it. Each gradient is rounded once at the end, and in
        ``"gradient_in_forward"`` once more if the upstream gradient is no power of two. float16: a
        chunk's backward starts from a power of two that keeps its gradients in range, measured for each
        chunk (one more backward pass through `loss_fn` alone; through `head` as well, if it returns an object
        that torch.utils._pytree does not look into), so that nothing underflows before a scaler sees it.
        On CUDA an F.cross_entropy of float32 logits (a sum or a value a row, of classes, without weights or
        smoothing) is taken from the logits in one pass, in float32 as torch's.

    Memory:
        Beyond `hidden`, its gradient and those of the parameters (and their float32 sums, 4 bytes an
        element, where they are half precision): what one chunk takes for its own forward and backward.
        Nothing of a chunk survives its turn. Random-number states are 5 KB a chunk where a chunk draws
        numbers on the CPU.

    Derivatives of higher order, torch.func's transforms and forward mode are exact, by recomputation chunk
    by chunk (of `chunk_size` rows: a workspace can't be measured there); parameters come in by a partial, as
    in ``partial(functional_call, head, parameters)``. Dropout has one mask, the forward pass's (of
    torch's default generators: one of your own is not wound back); under vmap, one for all elements
    (``randomness="same"``). torch.compile breaks the graph here, runs this as it is, and
    goes on. DDP: pass ``model.module.head`` and call it in the model's forward, or outside of it. FSDP2: let
    `head` be one unit, or part of the unit whose forward calls this; its parameters are gathered once and
    their gradients reduced once, however many chunks, and no rank waits for another's chunks.

    Raises:
        ValueError, TypeError: for rows that disagree, for a result that is no sum (a mean, a value a
            row), for parameters in closures, for buffers that change in the loop, for what changes before
            it is used again (labels in place, a frozen weight, ``head.eval()``, a constant in a closure or
            on a module; what cannot be seen is noticed by another loss, which on CUDA makes NaN), for batch
            normalisation, for tensors on several devices or not dense (sparse, nested), for a call in which
            nothing needs a gradient outside of torch.no_grad(). Each is also a RuntimeError.

    Source: the loop is that of pytorch issue 124480 (detach, ``loss.backward()`` a chunk), asked for
    there as one scalar that can be scaled.
    """
    options: dict[str, Any] = {
        "chunk_size": chunk_size,
        "workspace": workspace,
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

    def run_with(parts: tuple[Tensor, ...]) -> Any:
        return run(loss_fn, head, parts, token_tensors, leading, options)

    return gathered(head, parts, run_with)
