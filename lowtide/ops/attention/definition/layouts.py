"""Bring the caller's tensors into the computation's layout, [B, H, M, K], and results back.

Operands and results are views of the tensors. Where strides allow no view, they are copies.

Shapes: B batches; H query heads, G key heads; M queries, N keys; K features, E of values.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lowtide.core.errors import ArgumentError
from lowtide.ops.attention.definition.validation import check_tensors


class CallerLayout(NamedTuple):
    """Hold the caller's layout, and bring results back into it."""

    name: str
    leading: tuple[int, ...] = ()
    """The sizes of the caller's dimensions that became B and H, in the torch layout."""
    groups: int = 0
    """G in the layout [B, M, G, H, K]; 0 in other layouts."""

    def result(self, out_BHME: Tensor) -> Tensor:
        """Return a result [B, H, M, E] in the caller's layout."""
        if self.name == "torch":
            return out_BHME.reshape(*self.leading, *out_BHME.shape[2:])
        out = out_BHME.transpose(1, 2)
        if self.name == "BMK":
            return out[:, :, 0]
        return out.unflatten(2, (self.groups, -1)) if self.groups else out

    def logsumexp(self, logsumexp_BHM: Tensor) -> Tensor:
        """Return a logsumexp [B, H, M] in the caller's layout."""
        if self.name == "BMK":
            return logsumexp_BHM[:, 0]
        return logsumexp_BHM.unflatten(1, (self.groups, -1)) if self.groups else logsumexp_BHM


def from_xformers(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None
) -> tuple[CallerLayout, Tensor, Tensor, Tensor, Tensor | None]:
    """Return the layout, and query, key, value and bias in [B, H, M, K].

    The caller's layout is one of these:

        [B, M, K]
        [B, M, H, K], where key and value may have fewer heads
        [B, M, G, H, K], where key and value may be expanded along H, or have size 1 there
    """
    check_tensors({"query": query, "key": key, "value": value})
    dims = query.dim()
    if dims not in (3, 4, 5):
        raise ArgumentError(
            f"query must have shape [B, M, K], [B, M, H, K] or [B, M, G, H, K], got {list(query.shape)}"
        )
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dim() != dims:
            raise ArgumentError(f"{name} must have query's {dims} dimensions, got {list(tensor.shape)}")
    if dims == 3:
        if bias is not None and bias.dim() <= 3:
            bias = _padded(bias, 3, "[B, M, N]")[:, None]
        own = tuple(tensor[:, None] for tensor in (query, key, value))
        return CallerLayout("BMK"), *own, None if bias is None else _padded(bias, 4, "[B, 1, M, N]")
    if dims == 4:
        own = tuple(tensor.transpose(1, 2) for tensor in (query, key, value))
        return CallerLayout("BMHK"), *own, None if bias is None else _padded(bias, 4, "[B, H, M, N]")
    G, H = query.shape[2:4]
    for name, tensor in (("key", key), ("value", value)):
        if tensor.shape[2] != G or not (tensor.shape[3] == 1 or tensor.shape[3] == H):
            raise ArgumentError(
                f"{name} must have shape [B, N, {G}, 1 or {H}, ...], got {list(tensor.shape)}"
            )
    if key.shape[3] != value.shape[3]:
        raise ArgumentError(
            "key and value must have the same number of heads in a group, got "
            f"{key.shape[3]} and {value.shape[3]}; expand one of them"
        )
    needs_gradient = torch.is_grad_enabled() and (key.requires_grad or value.requires_grad)
    if key.stride(3) == value.stride(3) == 0 and not needs_gradient:
        key, value = key[:, :, :, :1], value[:, :, :, :1]
    own = tuple(tensor.permute(0, 2, 3, 1, 4).flatten(1, 2) for tensor in (query, key, value))
    return CallerLayout("BMGHK", groups=G), *own, None if bias is None else _grouped(bias, G, H)


def from_torch(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, enable_gqa: bool
) -> tuple[CallerLayout, Tensor, Tensor, Tensor, Tensor | None]:
    """Return the layout, and query, key, value and mask in [B, H, M, K].

    The caller's layout is [..., H, M, K]; the leading dimensions broadcast.
    """
    named = {"query": query, "key": key, "value": value}
    check_tensors(named)
    for name, tensor in named.items():
        if tensor.dim() < 2:
            raise ArgumentError(f"{name} must have shape [..., H, L, E], got {list(tensor.shape)}")
    dims = max(tensor.dim() for tensor in named.values())
    padded = [_padded(tensor, max(dims, 4), "") for tensor in named.values()]
    batches = torch.broadcast_shapes(*(tensor.shape[:-3] for tensor in padded))
    heads = [tensor.shape[-3] for tensor in padded]
    if not enable_gqa:
        if not all(size == 1 or size == max(heads) for size in heads):
            raise ArgumentError(
                f"query, key and value must have the same number of heads, got {heads}; "
                "pass enable_gqa=True if several query heads share a key head"
            )
        heads = [max(heads)] * 3
    own = tuple(
        tensor.expand(*batches, size, *tensor.shape[-2:]).flatten(0, -4)
        for tensor, size in zip(padded, heads)
    )
    leading = (*batches, heads[0])[2 - dims :] if dims > 2 else ()
    return CallerLayout("torch", leading), *own, None if mask is None else _flat_mask(mask, batches)


def _flat_mask(mask: Tensor, batches: torch.Size) -> Tensor:
    """Return the mask with the dimensions before its last three flattened to one."""
    dims = len(batches) + 3
    mask = _padded(mask, dims, f"{dims} dimensions", "attn_mask")
    own = mask.shape[:-3]
    if any(size != 1 for size in own) and own != batches:
        raise ArgumentError(
            f"attn_mask must have 1 or {list(batches)} in its leading dimensions, got {list(own)}"
            + _instead_of_expanding(own, batches)
        )
    return mask.flatten(0, -4)


def _instead_of_expanding(own: torch.Size, batches: torch.Size) -> str:
    """Return advice for a mask that differs along some of the batch dimensions, as for windows."""
    if any(size not in (1, batch) for size, batch in zip(own, batches)):
        return ""
    dim = next(dim for dim, size in enumerate(own) if size != 1)
    return (
        f". Fold dimension {dim}, in which it differs, into the heads of query, key, value and attn_mask "
        f"(with all its heads): pass x.movedim({dim}, -4).flatten(-4, -3) for each of them, and "
        f"result.unflatten(-3, ({own[dim]}, heads)).movedim(-4, {dim}) is the result; or call this function "
        f"once for each of its {own[dim]} places. (expand() would copy attn_mask for every batch)"
    )


def _padded(bias: Tensor, dims: int, wanted: str, name: str = "attn_bias") -> Tensor:
    """Return a tensor with `dims` dimensions; the added ones have size 1 and come first."""
    if bias.dim() > dims:
        raise ArgumentError(f"{name} must broadcast to {wanted}, got {list(bias.shape)}")
    return bias[(None,) * (dims - bias.dim())]


def _grouped(bias: Tensor, G: int, H: int) -> Tensor:
    """Return a bias [B, G, H, M, N] as [B, G H, M, N]."""
    bias = _padded(bias, 5, "[B, G, H, M, N]")
    if tuple(bias.shape[1:3]) not in ((1, 1), (G, H)):
        raise ArgumentError(
            f"attn_bias must have 1, 1 or {G}, {H} in the places of G and H, got {list(bias.shape)}; "
            "expand it"
        )
    return bias.flatten(1, 2)
