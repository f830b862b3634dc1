"""Merge attention to several sets of keys into attention to all of them.

Shapes: P parts; B batches, M queries, H heads, E features of values.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lowtide.core.checks import DTYPES
from lowtide.core.errors import ArgumentError, ArgumentTypeError, advises
from lowtide.ops.attention.definition.validation import check_tensors


@advises({}, "pass one list of pairs (out, logsumexp)")
def merge_attentions(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    r"""Merge attention of the same queries to disjoint sets of keys into attention to all the keys.

    Example::

        first = memory_efficient_attention_with_lse(q, k[:, :n], v[:, :n])
        second = memory_efficient_attention_with_lse(q, k[:, n:], v[:, n:])
        out, lse = merge_attentions([first, second])   # attention to all of k

    Each part p is weighted by its share of the softmax's denominator:

    .. math::
        \mathrm{lse} = \log \sum_p e^{\mathrm{lse}_p}, \qquad
        o = \sum_p e^{\mathrm{lse}_p - \mathrm{lse}}\, o_p.

    Shapes:
        Each part is (out, logsumexp) as :func:`memory_efficient_attention_with_lse` returns them:
        out [B, M, H, E] and logsumexp [B, H, M]; or [B, M, E] and [B, M]; or [B, M, G, H, E] and
        [B, G, H, M]. The result has the same shapes.

    Dtypes: weights and sums are computed in the dtype of the logsumexps (float32, or float64 for
    float64). The merged out has the dtype of the outs.

    Precision: a part's weight is as exact as its logsumexp. Where all scores are about -1e9, a
    float32 logsumexp has no digits left for the number of keys, so each part counts the same.

    Derivatives: to any order, with respect to the outs and the logsumexps. The gradients of query,
    key and value are those of attention to all the keys. A part in which a query sees no key
    (logsumexp -inf) has weight 0. A query that sees no key in any part gets 0 and logsumexp -inf,
    and its gradients are finite.

    Memory: O(P B M H) for the weights of P parts, and a few tensors of the size of out in the
    logsumexps' dtype.

    Raises:
        ValueError, TypeError: if there is no part, if parts differ in shape, dtype or device, or if
            a dtype is none of float32, bfloat16, float16 and float64. Each is also a RuntimeError.

    Source: the softmax over chunks of keys of Rabe and Staats (arxiv.org/abs/2112.05682).
    """
    outs, logsumexps = _checked(parts)
    logsumexp_P = torch.stack(logsumexps)
    max_1 = logsumexp_P.detach().amax(0).clamp(min=torch.finfo(logsumexp_P.dtype).min)
    weight_P = torch.exp(logsumexp_P - max_1)
    total_1 = weight_P.sum(0)
    nothing_1 = total_1 == 0
    total_1 = total_1.masked_fill(nothing_1, 1)
    share_P = weight_P / total_1
    terms = (_as_factor(share, out) * out for share, out in zip(share_P, outs))
    merged = sum(terms, start=torch.zeros((), dtype=logsumexp_P.dtype, device=logsumexp_P.device))
    logsumexp = (max_1 + total_1.log()).masked_fill(nothing_1, -torch.inf)
    return merged.to(outs[0].dtype), logsumexp


def _as_factor(share: Tensor, out: Tensor) -> Tensor:
    """Return a part's weight, in the shape of its logsumexp, as a factor of its out.

    [B, H, M] becomes [B, M, H, 1], and [B, M] becomes [B, M, 1].
    """
    return share.movedim(-1, 1)[..., None] if out.dim() > 3 else share[..., None]


def _checked(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the outs and the logsumexps, after checking that the parts match."""
    if isinstance(parts, Tensor):
        raise ArgumentTypeError("parts must be a list of pairs (out, logsumexp), got a tensor")
    if not parts:
        raise ArgumentError("parts must have one (out, logsumexp) at least, got none")
    for place, part in enumerate(parts):
        if not isinstance(part, (tuple, list)) or len(part) != 2:
            raise ArgumentTypeError(f"parts[{place}] must be (out, logsumexp), got {type(part).__name__}")
        out, logsumexp = part
        named = {f"parts[{place}][0]": out, f"parts[{place}][1]": logsumexp}
        check_tensors(named)
        for name, tensor in named.items():
            if tensor.dtype not in DTYPES:
                raise ArgumentTypeError(
                    f"{name} must be float32, bfloat16, float16 or float64, got {tensor.dtype}"
                )
        expected = _as_factor(logsumexp, out).shape[:-1] if logsumexp.dim() == out.dim() - 1 else None
        if out.dim() not in (3, 4, 5) or expected != out.shape[:-1]:
            raise ArgumentError(
                f"parts[{place}] must be out [B, M, H, E] and logsumexp [B, H, M], got {list(out.shape)} and "
                f"{list(logsumexp.shape)}"
            )
        for name, tensor, first in (("out", out, parts[0][0]), ("logsumexp", logsumexp, parts[0][1])):
            if (tensor.shape, tensor.dtype, tensor.device) != (first.shape, first.dtype, first.device):
                raise ArgumentError(
                    f"{name} of parts[{place}] must be like the first ({list(first.shape)}, {first.dtype}, "
                    f"{first.device}), got {list(tensor.shape)}, {tensor.dtype}, {tensor.device}"
                )
    return [out for out, _ in parts], [logsumexp for _, logsumexp in parts]
