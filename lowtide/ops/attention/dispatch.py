"""Send a call to the backend that backend.py chooses for it.

The operands are in the layout of the computation, [B, H, M, K], whatever the caller's layout is.

Shapes: B batches; H query heads; M queries, N keys; K features of queries and keys, E of values.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from lowtide.core.errors import ArgumentError
from lowtide.core.kernels.devices import runs_plain_torch
from lowtide.core.torch_private import breaks_old_graphs
from lowtide.ops.attention import delegate
from lowtide.ops.attention.backend import BackendChoice, choose_backend
from lowtide.ops.attention.definition import reference
from lowtide.ops.attention.definition.masks import AttentionBias, intervals
from lowtide.ops.attention.definition.operands import AttentionCall, Operands
from lowtide.ops.attention.definition.validation import check_operands
from lowtide.ops.attention.operator import autograd, higher_order
from lowtide.ops.attention.remembered import Signature, Tensors, remember


@breaks_old_graphs
def attention(
    call: AttentionCall, known: Signature | None = None, tensors: Tensors | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the result [B, H, M, E], and the logsumexp [B, H, M] if it is asked for.

    `known` is the call's signature (remembered.py), and `tensors` are the caller's own. If both are
    given, the call may be remembered.
    """
    E = call.operands.value.shape[3]
    call = prepare(call)
    backend = choose_backend(call).backend
    if known is not None and tensors is not None:
        remember(known, tensors, call, backend)
    out, logsumexp = _run(call, backend)
    return (out if E else out[..., :0]), logsumexp


def choose(call: AttentionCall) -> BackendChoice:
    """Return the backend that `attention` takes, or raise the error that it raises."""
    return choose_backend(prepare(call))


def prepare(call: AttentionCall) -> AttentionCall:
    """Return the call with checked operands in autocast's dtype.

    Operands without features get one feature of 0.
    """
    operands = _autocast(call.operands)
    check_operands(operands, bias_name="attn_bias" if call.options.rows_first else "attn_mask")
    if call.mask is not None:
        _check_mask(operands, call.mask)
    query, key, value = operands[:3]
    if query.shape[3] == 0:
        operands = operands._replace(query=pad(query, (0, 1)), key=pad(key, (0, 1)))
    if value.shape[3] == 0:
        operands = operands._replace(value=pad(value, (0, 1)))
    return call if operands is call.operands else call._replace(operands=operands)


def _run(call: AttentionCall, backend: str) -> tuple[Tensor, Tensor | None]:
    """Run the chosen backend.

    torch's kernels come first: their calls need neither intervals nor a seed.
    """
    if backend == "sdpa" and not torch.compiler.is_compiling():
        return delegate.attention(call.operands, call.mask is not None, call.options), None
    operands, options = call.operands, call.options._replace(backend=backend)
    if backend == "sdpa":
        return autograd.attention(operands, options._replace(causal=call.mask is not None), False)
    M, N = operands.query.shape[2], operands.key.shape[2]
    found = intervals(call.mask, call.window, M, N, operands.device)
    if found is not None:
        operands = operands._replace(first=found.first_M, end=found.end_M)
    if options.dropout:
        operands = operands._replace(seed=_draw_seed(call.seed, call.generator, operands.device))
    if backend == "reference":
        return reference.attention(operands, options)
    if backend == "higher_order":
        return higher_order.attention(operands, options)
    return autograd.attention(operands, options, call.with_logsumexp)


def _check_mask(operands: Operands, mask: AttentionBias) -> None:
    """Raise if the mask is for other sizes, or if it holds sequences and B is not 1."""
    B, _, M, _ = operands.query.shape
    mask.check(M, operands.key.shape[2])
    if B != 1 and mask.blocks(operands.device) is not None:
        raise ArgumentError(f"query must be a batch of one for a mask of several sequences, got {B}")


def _autocast(operands: Operands) -> Operands:
    """Cast query, key and value to autocast's dtype; like torch, leave float64 as it is."""
    device = operands.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return operands
    dtype = torch.get_autocast_dtype(device)
    query, key, value = (
        each.to(dtype) if each.is_floating_point() and each.dtype != torch.float64 else each
        for each in operands[:3]
    )
    return operands._replace(query=query, key=key, value=value)


def _draw_seed(
    seed: int | Tensor | None, generator: torch.Generator | None, device: torch.device
) -> Tensor:  # 0-d int64
    """Return dropout's seed on the device: the one given, or one drawn by the generator.

    Without a generator, torch's default one of the device draws the seed.
    """
    if isinstance(seed, Tensor):
        return seed.to(device)
    if seed is not None:
        return torch.full((), seed, dtype=torch.int64, device=device)
    source = device if generator is None else generator.device
    if runs_plain_torch(source.type):  # mps draws fewer bits at a time
        first, second = torch.randint(1 << 30, (2,), generator=generator, device=source)
        return (first * (1 << 30) + second).to(device)
    return torch.randint(1 << 62, (), generator=generator, device=source).to(device)
