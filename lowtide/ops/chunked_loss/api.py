"""Provide the public function of the chunked loss. Its docstring is the contract."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

from torch import Tensor

from lowtide.core.errors import advises
from lowtide.ops.chunked_loss import validation
from lowtide.ops.chunked_loss.execute import run
from lowtide.ops.chunked_loss.functional.fsdp import gathered
from lowtide.ops.linear_cross_entropy.definition.validation import check_normalizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

Function = Callable[..., Any]
Mode = Literal["gradient_in_forward", "recompute"]
INSTEAD_OF = dict.fromkeys(("chunks", "num_chunks", "n_chunks"), "pass chunk_size, a number of rows")
OTHERWISE = (
    "pass tensors with the rows of hidden by place, after hidden, and what else loss_fn takes by "
    "functools.partial(loss_fn, {unknown})"
)
Aux = tuple[Tensor, dict[str, Any]]
"""The loss, and the sums of aux over the chunks: tensors, or numbers if loss_fn gave numbers."""


class ChunkOptions(TypedDict, total=False):
    """Declare the options that do not change the type of the result."""

    chunk_size: int | None
    workspace: int | None
    normalizer: float | Tensor | None
    mode: Mode


@overload
def chunked_loss(
    loss_fn: Function,
    head: Function,
    hidden: Tensor | tuple[Tensor, ...],
    *token_tensors: Any,
    has_aux: Literal[False] = False,
    **options: "Unpack[ChunkOptions]",
) -> Tensor: ...
@overload
def chunked_loss(
    loss_fn: Function,
    head: Function,
    hidden: Tensor | tuple[Tensor, ...],
    *token_tensors: Any,
    has_aux: Literal[True],
    **options: "Unpack[ChunkOptions]",
) -> Aux: ...
@overload
def chunked_loss(
    loss_fn: Function,
    head: Function,
    hidden: Tensor | tuple[Tensor, ...],
    *token_tensors: Any,
    has_aux: bool,
    **options: "Unpack[ChunkOptions]",
) -> Tensor | Aux: ...
@overload
def chunked_loss(
    loss_fn: Function, *, has_aux: Literal[False] = False, **options: "Unpack[ChunkOptions]"
) -> Callable[..., Tensor]: ...
@overload
def chunked_loss(
    loss_fn: Function, *, has_aux: Literal[True], **options: "Unpack[ChunkOptions]"
) -> Callable[..., Aux]: ...
@overload
def chunked_loss(
    *, has_aux: Literal[False] = False, **options: "Unpack[ChunkOptions]"
) -> Callable[[Function], Callable[..., Tensor]]: ...
@overload
def chunked_loss(
    *, has_aux: Literal[True], **options: "Unpack[ChunkOptions]"
) -> Callable[[Function], Callable[..., Aux]]: ...
@advises(INSTEAD_OF, "pass (loss_fn, head, hidden, ...)", otherwise=OTHERWISE)
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
    r"""Compute any loss of any head, a chunk of rows at a time, as one scalar in one graph.

    Example::

        def loss_fn(logits, labels):
            return F.cross_entropy(logits.float(), labels, reduction="sum")

        labels = tokens[:, 1:]
        count = (labels != -100).sum()
        loss = chunked_loss(loss_fn, model.lm_head, hidden[:, :-1], labels, normalizer=count)
        loss.backward()

    The rows are cut into chunks :math:`C`. With the rows :math:`h_C` of `hidden` and :math:`t_C` of
    the token tensors in a chunk,

    .. math::
        L = \sum_C \mathrm{loss\_fn}\bigl(\mathrm{head}(h_C), t_C\bigr).

    This equals :math:`\mathrm{loss\_fn}(\mathrm{head}(h), t)` of all rows if `loss_fn` is a sum
    over rows, and if no row's result depends on other rows. The result is an ordinary tensor, and
    every tensor that it depends on gets one ordinary gradient. You may scale the result
    (``loss / n``, ``loss *= f``, a gradient scaler), call backward several times
    (``retain_graph=True``), or ask for single gradients.

    Called without `loss_fn`, it returns a decorator: ``@chunked_loss(chunk_size=1024)`` turns a
    loss function into a function of (head, hidden, \*token_tensors).

    Shapes:
        hidden [..., T, D], or a tuple of tensors [..., T, \*]; token tensors [..., T, \*]. `head`
        gets a chunk of hidden as [rows, D], or of each tensor of the tuple as [rows, \*].
        `loss_fn` gets a chunk of each token tensor as [rows, \*]. The result is 0-d, or [..., T] if
        `loss_fn` returns a value for each row (mode ``"recompute"``).

    Args:
        loss_fn: takes what `head` returned, then a chunk of each token tensor. It returns the sum
            of its rows' losses, a floating-point tensor.
        head: an nn.Module, a bound method of one, or a functools.partial:
            ``partial(F.linear, weight=weight)``. Arguments of the partial may be modules and
            tensors, also inside dictionaries, lists and tuples (a chunk gets a copy of such a
            container, and others as they are: logs). The same holds for `loss_fn`. The parameters
            of these modules, and these tensors, get gradients. A parameter that requires a gradient
            must not be reached only through a closure or a global: this is an error.
            The functions may make leaves of their own that nothing keeps after the chunk
            (``positions.detach().requires_grad_()``, to differentiate an energy by it).
            Parameters may be frozen, tied or adapted (LoRA). A parameter that no chunk reaches gets
            no gradient. A bound method brings its whole module. So it is an error if the module's
            trunk has batch statistics or is on another device; ``partial(logits, model.lm_head)``
            leaves the trunk out.
        hidden: may have any strides; a shifted slice such as ``hidden[:, :-1]`` is not copied as a
            whole. A tuple is passed to `head` as several arguments.
        token_tensors: tensors that are cut into the same rows as `hidden`: labels, weights,
            advantages, a teacher's hidden states. They may require gradients, and be complex.
            Numbers, None and 0-d tensors are passed to every chunk as they are.
        chunk_size: rows of a chunk; 1024 if neither this nor `workspace` is given. Larger chunks
            are faster until their GEMMs fill the device.
        workspace: bytes that a chunk may take, from which the number of its rows follows. This
            number is measured by running the first rows in chunks of growing size. It is kept for
            as long as `head` and `loss_fn` live. Measuring calls `head` and `loss_fn`, and then
            restores the states of the random generators. The number depends on shapes and dtypes
            alone. Memory that an operator allocates and frees while it runs is not counted.
        normalizer: divides the sum, as that of :func:`lowtide.linear_cross_entropy` does. It is a
            number above 0, or a 0-d tensor, which gets no gradient. It does not change aux. If
            `loss_fn` returns a value for each row, a normalizer is an error.
        has_aux: True if `loss_fn` returns (sum, dict of tensors or numbers). Each of the dict's
            values is detached and added up over the chunks; the result is then (loss, dict).
        mode: ``"gradient_in_forward"`` computes the gradients in forward, while a chunk is in
            memory. Backward computes no chunk again; the gradients are held until then.
            ``"recompute"`` computes each chunk again in backward. This takes one more forward pass
            of `head` and `loss_fn`, and holds no gradients; `loss_fn` may then return a value for
            each row.

    Precision:
        Half-precision terms are summed over chunks in float32: the loss, aux and the gradients of
        parameters. The loss that is returned is then float32, unless it has a value for each row.
        On CUDA, the GEMM of an F.linear adds its weight gradient to the float32 sum without
        rounding it. Autograd rounds any other gradient of a half-precision parameter once per
        chunk, before it is added.
        Sparse gradients (``nn.Embedding(sparse=True)``) are added up as sparse tensors.
        Each half-precision gradient is rounded once at the end. In ``"gradient_in_forward"`` it is
        rounded once more if the upstream gradient is no power of two.
        For float16 in ``"gradient_in_forward"``, backward of a chunk starts from a power of two.
        The power keeps the gradients in range, so that none underflows or overflows before a
        gradient scaler sees it. Finding the power takes one more backward pass through `loss_fn`.
        This pass also goes through `head` if `head` has parameters to train other than those of
        F.linear on CUDA, or returns an object that torch.utils._pytree does not look into. If
        `head` or `loss_fn` is compiled, the pass needs the chunk's forward pass once more.
        On CUDA with Triton, F.cross_entropy of float32 logits reads the logits in one pass and
        computes in float32, as torch does. This holds for class indices with ``reduction="sum"`` or
        ``"none"``, and without class weights or label smoothing.

    Memory:
        Beyond `hidden`, its gradient and the gradients of the parameters, the call holds what one
        chunk takes for its own forward and backward. Each half-precision parameter also has a
        float32 sum, 4 bytes per element. Nothing of a chunk is kept after it, except for the states
        of the random generators: 5 KB for each chunk that draws random numbers.

    Derivatives: higher-order derivatives, torch.func's transforms and forward mode are exact. They
    compute the chunks again. Under a transform or forward mode, give `chunk_size`: a workspace
    cannot be measured there. Pass parameters by a partial, as in
    ``partial(functional_call, head, parameters)``. Dropout has the mask of the forward pass each
    time, if it uses torch's default generators; a generator of your own is not rewound. Under vmap
    all elements share one mask (``randomness="same"``).

    torch.compile breaks the graph at this function, runs it eagerly, and compiles what follows.
    DDP: pass ``model.module.head``; call this function inside or outside of the model's forward.
    FSDP2: make `head` one unit, or part of the unit whose forward calls this function. The
    parameters are then gathered once and their gradients reduced once, however many chunks there
    are. No rank waits for another rank's chunks.

    Raises:
        ValueError, TypeError: in these cases; each is also a RuntimeError.
            Tensors have different rows, are on several devices, or are not dense (sparse, nested).
            A result is no sum (a mean; a value for each row, in ``"gradient_in_forward"``).
            A parameter is in a closure. A tensor kept from a chunk is differentiated outside of it.
            A buffer changes in the loop, or a learned parameter's ``.data`` is assigned to. A batch
            normalisation uses batch statistics.
            A value changes before it is used again: labels in place, a frozen weight,
            ``head.eval()``, a constant in a closure or on a module. If this check misses a change,
            the loss of a chunk that is computed again differs, which is an error too; on CUDA the
            gradients become NaN instead.
            Nothing needs a gradient, and the call is not under torch.no_grad().

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
    validation.check_options(loss_fn, head, chunk_size, workspace, mode)
    parts = hidden if isinstance(hidden, tuple) else (hidden,)
    leading = validation.check_rows(parts, token_tensors)
    check_normalizer(normalizer, "mean", parts[0])

    return gathered(head, parts, lambda parts: run(loss_fn, head, parts, token_tensors, leading, options))
