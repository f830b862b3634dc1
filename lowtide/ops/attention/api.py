"""Provide the public functions of attention. Their docstrings are the contract."""

import torch
from torch import Tensor
from torch.nn import Parameter

from lowtide.core.errors import ArgumentError, advises
from lowtide.ops.attention import dispatch, remembered
from lowtide.ops.attention.definition import layouts, masks
from lowtide.ops.attention.definition.masks import (
    AttentionBias,
    LowerTriangularMask,
    from_torch,
    is_from_torch,
)
from lowtide.ops.attention.definition.operands import AttentionCall, AttentionOptions, Operands
from lowtide.ops.attention.definition.validation import (
    Backend,
    check_backend,
    check_bias,
    check_numbers,
    check_seed,
    check_window,
)
from lowtide.ops.attention.remembered import signature

Window = tuple[int | None, int | None]

# Advice for an argument that torch, FlashAttention, FlexAttention or xformers has.
INSTEAD_OF = {
    "q": "pass query",
    "k": "pass key",
    "v": "pass value",
    "attn_mask": "pass attn_bias",
    "dropout_p": "pass p",
    **dict.fromkeys(("is_causal", "causal"), "pass attn_bias=lowtide.attn_bias.LowerTriangularMask()"),
    "softmax_scale": "pass scale",
    "window_size": "pass window",
    "op": "pass backend",
    "output_dtype": "pass nothing, and cast the result",
    "score_mod": "pass attn_bias, a tensor, or softcap",
    "block_mask": "pass attn_bias, a mask of lowtide.attn_bias or a tensor",
}
USAGE = "pass (query, key, value, attn_bias, p, scale) in this order, and the rest by name"
INSTEAD_OF_IN_TORCH = {
    "q": "pass query",
    "k": "pass key",
    "v": "pass value",
    "attn_bias": "pass attn_mask",
    "p": "pass dropout_p",
    **dict.fromkeys(
        ("softcap", "window", "seed", "generator", "backend"),
        "call lowtide.memory_efficient_attention, which has it",
    ),
}
USAGE_OF_TORCH = "pass (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa) in this order"


@advises(INSTEAD_OF, USAGE)
def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    softcap: float | None = None,
    window: Window | None = None,
    seed: int | Tensor | None = None,
    generator: torch.Generator | None = None,
    backend: Backend = "auto",
) -> Tensor:
    r"""Compute exact attention in O(M) memory, without the matrix of scores, forward or backward.

    Example::

        out = lowtide.memory_efficient_attention(q, k, v, lowtide.attn_bias.LowerTriangularMask())
        out = lowtide.memory_efficient_attention(q, k, v, relative_bias)  # [1, H, M, N], trained

    With scale s, soft cap c, bias b, and dropout's factor :math:`D_{ij}` (0, or
    :math:`1 / (1 - p)`),

    .. math::
        z_{ij} = c \tanh(s\, q_i \cdot k_j / c) + b_{ij}, \quad
        \mathrm{lse}_i = \log \sum_j e^{z_{ij}}, \quad
        o_i = \sum_j D_{ij}\, e^{z_{ij} - \mathrm{lse}_i}\, v_j.

    Sums are over the keys that query i sees. A query that sees none gets 0, and finite gradients.

    Shapes:
        query [B, M, H, K], key [B, N, G, K], value [B, N, G, E]; the result is [B, M, H, E].
        G divides H. The H / G query heads of a key head follow each other; no key is repeated.
        Also [B, M, K], which is one head; and [B, M, G, H, K], with key and value [B, N, G, 1, ...]
        or [B, N, G, H, ...]. Keys that were expanded are not copied where they need no gradient.
        Any sizes and any strides. With K = 0 each product is 0.

    Args:
        attn_bias: one of these:
            a tensor that broadcasts to [B, H, M, N] ([B, M, N] or [B, G, H, M, N] in the other
            layouts): floating-point, added to the scores; or bool, where True takes part;
            a mask of :mod:`lowtide.attn_bias`, with or without such a tensor
            (``mask.add_bias(tensor)``);
            ``causal_upper_left`` or ``causal_lower_right`` of torch.nn.attention.bias.
            The tensor may require a gradient, which has its own shape: that of a bias [1, H, 1, N]
            costs H N numbers. A view that is expanded first gets the gradient of that view, so pass
            what is not expanded.
        p: rate of dropout, in [0, 1]; applied whenever it is not 0. Which scores are dropped
            depends on (seed, b, h, i, j) alone: it is the same on CPU and CUDA, for any tile size,
            in forward and backward.
        scale: s, any finite number; :math:`1/\sqrt K` by default (1 with K = 0).
        softcap: c, above 0; None for none. (Gemma 2: 50.)
        window: (left, right): query i sees keys from i + N - M - left to i + N - M + right; -1 or
            None is no limit. With a mask, a query sees the keys that both allow. In a mask of
            several sequences, N and M are those of the sequence.
        seed: dropout's seed, an int or a 0-d int64 tensor. By default it is drawn from `generator`,
            or from torch's default generator.
        generator: a torch.Generator that draws the seed; not together with `seed`.
        backend: "auto" runs "sdpa" (torch's own kernels) where those are known to compute the same,
            fast and in O(M) memory; else "triton" (our kernels) on a CUDA device that they support;
            else "torch" (tiles of BLAS products). "reference" is the plain definition, which holds
            all scores. A backend that is named runs, or raises with the reason why it cannot.
            docs/reference/ways.md has the table.

    Dtypes: float16, bfloat16, float32 or float64, the same for query, key and value (autocast's
    under autocast). The bias may have any of them. The result has query's dtype. Statistics and
    sums are float32, or float64 for float64.

    Memory, beside inputs, result and gradients:
        Every backend holds a few tiles of fixed size. For gradients it also keeps two float32 for
        each query and head, whose sum is the logsumexp. In half precision "triton" keeps what
        rounding took off the result, as much memory as the result. Backward computes the scores
        again.
        Backward of "triton" stores gradients of some scores at a time in three cases: float32
        operands, a bias [.., M, N] that is shared or beside more than 128 features, and more than
        256 features. It holds at most 304 MiB, and at
        most three tenths of what all scores take in the operands' dtype; or, where that is more,
        what 128 keys of one batch and key head take (of all that share a bias). In half precision
        the gradient of these queries in float32 comes on top.
        Forward of "triton" in float32 holds key and value, and above 128 features query, a second
        time, as bfloat16 pieces: 1.5 times their memory.
        On CUDA, backward of "sdpa" also holds a float32 for each number of query. It copies an
        upstream gradient that does not have the result's strides. Under torch.compile, operands
        that do not begin at a multiple of 16 bytes are copied too.
        Derivatives of higher order, forward mode and vmap differentiate the definition, a chunk of
        queries at a time: O(M), exact, not fast.

    Determinism: the same call, with tensors of the same strides and alignment, gives the same bits,
    gradients included. Where "sdpa" runs it on CUDA, this holds under
    ``torch.use_deterministic_algorithms(True)``.

    Raises:
        ValueError, TypeError: for shapes, dtypes, devices and options that do not fit; for nested,
            sparse and distributed tensors; and for tensors of a class with a ``__torch_function__``
            of its own. Each is also a RuntimeError, which is what torch raises.

    Transforms: torch.compile(fullgraph=True), torch.func, vmap, forward mode, derivatives of any
    order and checkpointing. torch.compile does not combine with the others: compiled code cannot be
    differentiated twice.

    Source: the signature and masks of github.com/facebookresearch/xformers; Rabe and Staats
    (arxiv.org/abs/2112.05682); FlashAttention 2 (arxiv.org/abs/2307.08691).
    """
    out, _ = _attention(
        query, key, value, attn_bias, p, scale, softcap, window, seed, generator, backend, False
    )
    return out


@advises(INSTEAD_OF, USAGE)
def memory_efficient_attention_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    softcap: float | None = None,
    window: Window | None = None,
    seed: int | Tensor | None = None,
    generator: torch.Generator | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    r"""Compute :func:`memory_efficient_attention`, and the logsumexp of each query's scores.

    Example::

        out, lse = lowtide.memory_efficient_attention_with_lse(q, k, v)
        loss = task_loss(out) + 1e-4 * lse.square().mean()                     # a z-loss
        gate = torch.sigmoid(lse - sink[:, None]).movedim(1, 2)[..., None]     # an attention sink

    Shapes: the logsumexp is [B, H, M] ([B, M] or [B, G, H, M] in the other layouts), in float32, or
    in float64 for float64. It is -inf where a query sees no key. Dropout does not change it.

    Both results are differentiable, alone or together:
    :math:`\partial\, \mathrm{lse}_i / \partial z_{ij} = e^{z_{ij} - \mathrm{lse}_i}`.

    The arguments, memory, precision and errors are those of :func:`memory_efficient_attention`.
    torch's own kernels give no logsumexp, so `backend="sdpa"` raises.
    """
    out, logsumexp = _attention(
        query, key, value, attn_bias, p, scale, softcap, window, seed, generator, backend, True
    )
    assert logsumexp is not None
    return out, logsumexp


@advises(INSTEAD_OF_IN_TORCH, USAGE_OF_TORCH)
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    r"""Compute torch's attention function in O(M) memory for every call.

    Example::

        out = lowtide.scaled_dot_product_attention(q, k, v, relative_bias, is_causal=True)

    It replaces :func:`torch.nn.functional.scaled_dot_product_attention` wherever that is called
    with plain tensors. It also supports what torch's fast kernels reject, and does not hold all
    scores for it.

    Shapes: query [..., H, M, K], key [..., G, N, K], value [..., G, N, E], result [..., H, M, E];
    leading dimensions broadcast. With `enable_gqa`, G may be any number that divides H.

    Args:
        attn_mask: a bool tensor (True takes part) or a floating-point tensor of any dtype (added to
            the scores), of any shape that broadcasts to [..., H, M, N]. Of several leading
            dimensions, it has all or none. It may require a gradient, which has its own shape, and
            may be passed together with `is_causal`. Or one of torch's biases, ``causal_upper_left``
            or ``causal_lower_right``.
        dropout_p: rate of dropout. The seed is drawn from torch's default generator of the device;
            which scores a seed drops is the same on every device.
        is_causal: query i sees the keys j <= i.
        scale: a finite number; :math:`1/\sqrt K` by default.
        enable_gqa: let the H / G query heads that follow each other share a key head.

    A query that sees no key gets 0. Dtypes, memory, determinism, errors and transforms are those of
    :func:`memory_efficient_attention` with ``backend="auto"``.
    """
    known = None
    if attn_mask is None or type(attn_mask) in (Tensor, Parameter):
        given = is_causal, dropout_p, type(dropout_p), scale, type(scale), enable_gqa
        known = signature(query, key, value, attn_mask, "torch", *given)
        if (found := remembered.run(known, query, key, value, attn_mask)) is not None:
            return found[0]
    check_bias("attn_mask", attn_mask)
    check_numbers(dropout_p, scale, None)
    mask, tensor = _split_bias(attn_mask)
    layout, *own = layouts.from_torch(query, key, value, tensor, enable_gqa)
    if is_causal:
        if mask is not None:
            raise ArgumentError("attn_mask must be a tensor or None beside is_causal, got a mask")
        mask = LowerTriangularMask()
    options = AttentionOptions(_scale(scale, query), dropout=dropout_p, rows_first=False)
    call = AttentionCall(Operands(*own), mask, None, options)
    out, _ = dispatch.attention(call, known, (query, key, value, tensor))
    return layout.result(out)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | None,
    p: float,
    scale: float | None,
    softcap: float | None,
    window: Window | None,
    seed: int | Tensor | None,
    generator: torch.Generator | None,
    backend: Backend,
    with_logsumexp: bool,
) -> tuple[Tensor, Tensor | None]:
    """Check the arguments and compute attention in the xformers layouts."""
    known = None
    kind, window_kind = masks.likeness(attn_bias), type(window)
    if kind is not None and seed is generator is None and (window is None or window_kind is tuple):
        given = p, type(p), scale, type(scale), softcap, type(softcap), backend, with_logsumexp
        of_window = window and (window, *map(type, window))
        tensor = attn_bias.bias if isinstance(attn_bias, AttentionBias) else attn_bias
        known = signature(query, key, value, tensor, "xformers", kind, of_window, *given)
        if (found := remembered.run(known, query, key, value, tensor)) is not None:
            return found
    check_bias("attn_bias", attn_bias)
    check_numbers(p, scale, softcap)
    check_backend(backend)
    check_seed(seed, generator)
    band = check_window(window)
    mask, tensor = _split_bias(attn_bias)
    layout, *own = layouts.from_xformers(query, key, value, tensor)
    options = AttentionOptions(_scale(scale, query), float(softcap or 0), float(p), True, backend)
    call = AttentionCall(Operands(*own), mask, band, options, with_logsumexp, seed, generator)
    out, logsumexp = dispatch.attention(call, known, (query, key, value, tensor))
    return layout.result(out), None if logsumexp is None else layout.logsumexp(logsumexp)


def _split_bias(attn_bias: Tensor | AttentionBias | None) -> tuple[AttentionBias | None, Tensor | None]:
    """Return the mask and the tensor that `attn_bias` consists of."""
    if is_from_torch(attn_bias):
        return from_torch(attn_bias), None
    if isinstance(attn_bias, AttentionBias):
        return attn_bias, attn_bias.bias
    return None, attn_bias


def _scale(scale: float | None, query: Tensor) -> float:
    """Return `scale`, or 1 / sqrt(K) if it is None."""
    return max(query.shape[-1], 1) ** -0.5 if scale is None else float(scale)
