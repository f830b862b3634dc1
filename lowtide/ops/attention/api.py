"""Provide the public functions of attention.

Their docstrings are the contract.
"""

import torch
from torch import Tensor
from torch.nn import Parameter

from lowtide.core.errors import ArgumentError, advises
from lowtide.ops.attention import aligned, dispatch, remembered
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

# What to pass in place of an argument that torch, FlashAttention, FlexAttention or xformers has.
INSTEAD_OF = {
    "q": "pass query",
    "k": "pass key",
    "v": "pass value",
    "attn_mask": "pass attn_bias",
    "dropout_p": "pass p",
    **dict.fromkeys(("is_causal", "causal"), "pass attn_bias=lowtide.attn_bias.LowerTriangularMask()"),
    "softmax_scale": "pass scale",
    "window_size": "pass window",
    "op": "leave it out, or pass backend",
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

    Without a soft cap, :math:`z_{ij} = s\, q_i \cdot k_j + b_{ij}`. Sums are over the keys that
    query i sees. A query that sees no key gets 0, and its gradients are finite.

    Shapes:
        query [B, M, H, K], key [B, N, G, K], value [B, N, G, E]; the result is [B, M, H, E].
        G divides H. The H / G query heads that share a key head follow each other. Keys are not
        repeated in memory.
        There are two other layouts. [B, M, K] is one head. [B, M, G, H, K] has H query heads for
        each of G key heads; key and value are [B, N, G, 1, ...] or [B, N, G, H, ...]. In this
        layout, key and value that were expanded along H are not copied if they need no gradient.
        Any sizes and strides are supported. With K = 0 each product of a query and a key is 0.

    Args:
        attn_bias: one of these:
            a tensor that broadcasts to [B, H, M, N] (in the other layouts [B, M, N], or
            [B, G, H, M, N] with both G and H or 1 for both): floating-point, added to the scores;
            or bool, where True takes part;
            a mask of :mod:`lowtide.attn_bias`, with or without such a tensor
            (``mask.add_bias(tensor)``);
            ``causal_upper_left`` or ``causal_lower_right`` of torch.nn.attention.bias.
            The tensor may require a gradient. The gradient has the tensor's own shape: that of a
            bias [1, H, 1, N] has H N numbers. Do not expand the tensor yourself: its gradient would
            have the expanded size.
        p: rate of dropout, in [0, 1]. Dropout is applied whenever p is not 0. Which scores are
            dropped depends on (seed, b, h, i, j) alone: the seed, batch, head, query and key. So it
            is the same on CPU and CUDA, for any tile size, in forward and backward.
        scale: s, any finite number; :math:`1/\sqrt K` by default (1 with K = 0).
        softcap: c, above 0; None for no soft cap. (Gemma 2: 50.)
        window: (left, right): query i sees the keys from i + N - M - left to i + N - M + right; -1
            or None is no limit. With a mask, a query sees the keys that both allow. In a mask of
            several sequences, queries and keys are counted within each sequence.
        seed: dropout's seed, an int or a 0-d int64 tensor. By default it is drawn from `generator`,
            or from torch's default generator of the device.
        generator: a torch.Generator that draws the seed; not together with `seed`.
        backend: "auto" runs "sdpa" (torch's own kernels) if these are known to compute the same,
            fast and in O(M) memory. Otherwise it runs "triton" (lowtide's kernels) on a CUDA device
            that they support, and "torch" (tiles of BLAS products) elsewhere. "reference" is the
            plain definition, which holds all scores. A backend that is named runs, or raises with
            the reason why it cannot. But under a transform, the definition runs in chunks of
            queries in place of "triton" and "torch". The page "Which way a call takes" of the
            documentation has the table.

    Dtypes: float16, bfloat16, float32 or float64, the same for query, key and value. Autocast casts
    these three to its dtype, except float64. The bias may have any of the four dtypes. The result
    has the dtype of query (under autocast, after the cast). Statistics and sums are float32, or
    float64 for float64.

    Memory, beside inputs, result and gradients:
        Every backend but "reference" holds a few tiles of fixed size. For gradients it also keeps
        at most two float32 numbers for each query and head (float64 for float64). Backward computes
        the scores again.
        In half precision, up to 256 features of value, "triton" also keeps the part of the result
        that rounding took off, in as much memory as the result. It does not for 264 heads B H or
        more of at most 64 queries, keys and features, unless heads share key heads or a bias.
        What masks and windows of up to 16,384 queries and keys hide stays for later calls, in at
        most 4 MiB.
        Backward of "triton" may store gradients of scores and, with many features, weights, some at
        a time. It does so in three cases: float32 operands; a bias [.., M, N] that is shared or
        comes with more than 128 features; more than 256 features. It stores at most 304 MiB, and at
        most the largest of these: three tenths of what all scores take in the operands' dtype; a
        sixteenth of query, key, value and result; 16 MiB. Where all scores take at most 96 MiB, it
        may store three quarters of that and a quarter of query, key, value and result, in up to 64
        MiB. If that is too little for 128 keys of one batch and key head, it takes the memory for
        these; with a shared bias, for 128 keys of all batches and heads that share it. In half
        precision it then also holds a float32 gradient of the queries of these heads. Where a
        kernel of its own sums a shared bias's gradient, backward in half precision may hold a copy
        of the bias, no larger than the gradient of key (of value, if key needs none).
        Forward of "triton" in float32 also holds key and value split into bfloat16 pieces. Three
        pieces take 1.5 times the tensor's memory. Where torch allows TF32 there are two, which take
        as much as the tensor. Query is split in memory too if it has more features than a tile (64
        to 256, by the card and the number of pieces).
        With few keys the kernels of "triton" sum the gradients of key and value in parts, in at
        most 24 MiB.
        On CUDA in half precision, query, key and value are copied if rows begin off 16 bytes, and
        the copies are held until backward: from 256 queries and keys on, or 64 for odd features.
        On CUDA, backward of "sdpa" also holds a float32 number for each element of query. It
        copies an upstream gradient that does not have the result's strides. Under torch.compile it
        also copies operands that do not begin at a multiple of 16 bytes.
        Derivatives of higher order, forward mode and vmap differentiate the definition, a chunk of
        queries at a time: in O(M) memory, exactly, but slowly.

    Determinism: the same call, with tensors of the same strides and alignment, gives the same bits,
    gradients included. With "sdpa" on CUDA, this holds only under
    ``torch.use_deterministic_algorithms(True)``.

    Raises:
        ValueError, TypeError: for shapes, dtypes, devices and options that do not fit; for nested,
            sparse and distributed tensors; and for tensors of a class with a ``__torch_function__``
            of its own. Each is also a RuntimeError, because torch raises that.

    Transforms: the function supports torch.compile(fullgraph=True), torch.func, vmap, forward mode,
    derivatives of any order and checkpointing. torch.compile cannot be combined with the others:
    compiled code cannot be differentiated twice.

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
    r"""Compute attention with torch's signature, in O(M) memory for every call.

    Example::

        out = lowtide.scaled_dot_product_attention(q, k, v, relative_bias, is_causal=True)

    It replaces :func:`torch.nn.functional.scaled_dot_product_attention` in any call with plain
    tensors. It also supports calls that torch's fast kernels reject, and never holds all scores.

    Shapes: query [..., H, M, K], key [..., G, N, K], value [..., G, N, E], result [..., H, M, E];
    leading dimensions broadcast. With `enable_gqa`, G may be any number that divides H.

    Args:
        attn_mask: a bool tensor (True takes part) or a floating-point tensor of any dtype (added to
            the scores), of any shape that broadcasts to [..., H, M, N]. Its
            dimensions before [H, M, N] are those of the result, or all are 1 or left out. It may
            require a gradient, which has the tensor's own shape. It may be passed together with
            `is_causal`.
            Or one of torch's biases, ``causal_upper_left`` or ``causal_lower_right``, without
            `is_causal`.
        dropout_p: rate of dropout. The seed is drawn from torch's default generator of the device.
            A seed drops the same scores on every device.
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
        causal = LowerTriangularMask() if is_causal else None
        if (found := remembered.run(known, causal, query, key, value, attn_mask)) is not None:
            return found[0]
    if (copies := aligned.aligned_copies(query, key, value, "auto", rows_at=-2)) is not None:
        scale = _scale(scale, query) if scale is None else scale
        out = scaled_dot_product_attention(*copies, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return aligned.result(out, value.shape[-1])
    check_bias("attn_mask", attn_mask)
    check_numbers(dropout_p, scale, None, p_name="dropout_p")
    mask, tensor = _split_bias(attn_mask)
    layout, *own = layouts.from_torch(query, key, value, tensor, enable_gqa)
    if is_causal:
        if mask is not None:
            raise ArgumentError("attn_mask must be a tensor or None beside is_causal, got a mask")
        mask = LowerTriangularMask()
    options = AttentionOptions(_scale(scale, query), dropout=float(dropout_p), rows_first=False)
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
        mask = attn_bias if isinstance(attn_bias, AttentionBias) else None
        tensor = attn_bias if mask is None else mask.bias
        known = signature(query, key, value, tensor, "xformers", kind, of_window, *given)
        if (found := remembered.run(known, mask, query, key, value, tensor)) is not None:
            return found
    if (copies := aligned.aligned_copies(query, key, value, backend, rows_at=1)) is not None:
        scale = _scale(scale, query) if scale is None else scale
        query, key, own_value = copies
        out, logsumexp = _attention(
            query, key, own_value, attn_bias, p, scale, softcap, window, seed, generator, backend,
            with_logsumexp,
        )  # fmt: skip
        return aligned.result(out, value.shape[-1]), logsumexp
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
