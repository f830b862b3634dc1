"""From tensors in one layout to one of five ways: torch's own kernels (in a compiled graph an engine of the
operators), the registered operators (two engines more), the transforms' way, or the dense reference.

Shapes: B batches; H query heads; M queries, N keys; E features of values.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from lowtide.core.autodiff import active
from lowtide.ops.attention import delegate
from lowtide.ops.attention.definition import reference
from lowtide.ops.attention.definition.masks import AttentionBias, Band, LowerTriangularMask, intervals
from lowtide.ops.attention.definition.operands import Operands, Options
from lowtide.ops.attention.definition.validation import ArgumentError, check_operands
from lowtide.ops.attention.operator import autograd, higher_order

CAUSAL = LowerTriangularMask()


class Choice(NamedTuple):
    backend: str
    """"sdpa", or what was asked for: which engine "auto" stands for is chosen after that (backends.py)."""
    reason: str | None = None
    """Why "auto" is not "sdpa"."""


def attention(
    operands: Operands,
    mask: AttentionBias | None,
    window: Band | None,
    options: Options,
    seed: int | Tensor | None,
    generator: torch.Generator | None,
    with_logsumexp: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """[B, H, M, E], and the logsumexp [B, H, M] if it is asked for."""
    E = operands.value.shape[3]
    operands = prepared(operands, mask)
    out, logsumexp = _attention(operands, mask, window, options, seed, generator, with_logsumexp)
    return (out if E else out[..., :0]), logsumexp


def _attention(
    operands: Operands,
    mask: AttentionBias | None,
    window: Band | None,
    options: Options,
    seed: int | Tensor | None,
    generator: torch.Generator | None,
    with_logsumexp: bool,
) -> tuple[Tensor, Tensor | None]:
    way = choose(operands, mask, window, options, with_logsumexp).backend
    options = options._replace(backend=way)
    if way == "sdpa":
        causal = mask is not None
        if torch.compiler.is_compiling():
            return autograd.attention(operands, options._replace(causal=causal), with_logsumexp)
        return delegate.attention(operands, causal, options), None
    M, N = operands.query.shape[2], operands.key.shape[2]
    if (found := intervals(mask, window, M, N, operands.device)) is not None:
        operands = operands._replace(first=found.first_M, end=found.end_M)
    if options.dropout:
        operands = operands._replace(seed=_drawn(seed, generator, operands.device))
    if way == "reference":
        return reference.attention(operands, options)
    if active(*operands):
        return higher_order.attention(operands, options)
    return autograd.attention(operands, options, with_logsumexp)


def prepared(operands: Operands, mask: AttentionBias | None) -> Operands:
    """Returns the checked operands in the dtype of autocast. In place of no features they have one, of 0."""
    operands = _autocast(operands)
    check_operands(operands)
    if mask is not None:
        _check_mask(operands, mask)
    query, key, value = operands[:3]
    if query.shape[3] == 0:
        operands = operands._replace(query=pad(query, (0, 1)), key=pad(key, (0, 1)))
    if value.shape[3] == 0:
        operands = operands._replace(value=pad(value, (0, 1)))
    return operands


def _check_mask(operands: Operands, mask: AttentionBias) -> None:
    B, _, M, _ = operands.query.shape
    mask.check(M, operands.key.shape[2])
    if B != 1 and mask.blocks(operands.device) is not None:
        raise ArgumentError(f"query must be a batch of one for a mask of several sequences, got {B}")


def choose(
    operands: Operands,
    mask: AttentionBias | None,
    window: Band | None,
    options: Options,
    with_logsumexp: bool,
) -> Choice:
    """Torch's own kernels, where these are asked for or "auto" stands for them."""
    backend = options.backend
    if backend not in ("auto", "sdpa"):
        return Choice(backend)
    reason = delegate.reason_against(operands, mask, window, options, with_logsumexp)
    if reason is None:
        return Choice("sdpa")
    if backend == "sdpa":
        raise ArgumentError(f"backend='sdpa' cannot run this call: {reason}; use backend='auto'")
    return Choice(backend, reason)


def _autocast(operands: Operands) -> Operands:
    """As torch's own: query, key and value in the dtype of autocast, unless one is float64."""
    device = operands.device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return operands
    dtype = torch.get_autocast_dtype(device)
    query, key, value = (
        each.to(dtype) if each.is_floating_point() and each.dtype != torch.float64 else each
        for each in operands[:3]
    )
    return operands._replace(query=query, key=key, value=value)


def _drawn(
    seed: int | Tensor | None, generator: torch.Generator | None, device: torch.device
) -> Tensor:  # 0-d int64
    if isinstance(seed, Tensor):
        return seed.to(device)
    if seed is not None:
        return torch.full((), seed, dtype=torch.int64, device=device)
    source = device if generator is None else generator.device
    return torch.randint(1 << 62, (), generator=generator, device=source).to(device)
