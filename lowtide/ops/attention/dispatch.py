"""Send a call, in one layout, on one of five ways.

These are torch's own kernels, eager (delegate.py) or in a compiled graph (as a backend of the
operators); the operators with the Triton or the torch backend; transforms and forward mode
(higher_order.py); and the dense reference.

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
    """Hold "sdpa" or the backend that was asked for, and why "auto" is not "sdpa"."""

    backend: str
    """"sdpa", or what was asked for; backends.py chooses later which backend "auto" stands for."""
    reason: str | None = None
    """Why "auto" is not "sdpa"; None where it is, or where another backend was named."""


def attention(
    operands: Operands,
    mask: AttentionBias | None,
    window: Band | None,
    options: Options,
    seed: int | Tensor | None,
    generator: torch.Generator | None,
    with_logsumexp: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the result [B, H, M, E], and the logsumexp [B, H, M] if it is asked for."""
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
    """Compute what `attention` returns, from operands that are prepared."""
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
    """Return the checked operands in autocast's dtype.

    Operands without features get one feature of 0.
    """
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
    """Raise if the mask was made for other sizes, or has several sequences for several batches."""
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
    """Choose "sdpa" where torch's own kernels are asked for or "auto" stands for them."""
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
    """Cast query, key and value to autocast's dtype, but not float64, as torch does."""
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
    """Return dropout's seed on the device: the one given, or one that the generator draws."""
    if isinstance(seed, Tensor):
        return seed.to(device)
    if seed is not None:
        return torch.full((), seed, dtype=torch.int64, device=device)
    source = device if generator is None else generator.device
    return torch.randint(1 << 62, (), generator=generator, device=source).to(device)
