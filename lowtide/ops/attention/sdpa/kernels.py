"""Run torch's own kernels as a backend of the operators.

Compiled graphs run torch's kernels in this way, and so do calls under hooks on saved tensors
(delegate.py). The addresses of a graph's tensors are known only when the graph runs, and no guard
checks them. So the operator copies a tensor that torch's kernels would misread. Forward keeps
statistics of each row, as the other backends do.

Shapes: B batches; H query heads; M queries, N keys.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lowtide.core import torch_private
from lowtide.core.errors import ArgumentError
from lowtide.ops.attention.definition.operands import AttentionOptions, Operands
from lowtide.ops.attention.sdpa.alignment import NO_DROPOUT, readable, readable_in

# torch's kernels that do not hold all scores.
FUSED = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
FUSED_NUMBERS = tuple(backend.value for backend in FUSED)
aten = torch.ops.aten
# The memory-efficient kernel pads its logsumexp to a multiple of this many rows.
PADDED_ROWS = 32


def forward(operands: Operands, options: AttentionOptions, keep_statistics: bool) -> list[Tensor]:
    """Return the result and, if asked for, the statistics: logsumexp and 0, [B, H, 2, M]."""
    tensors = [readable(each) for each in operands[:3]]
    kernel = _kernel(tensors, options, keep_statistics)
    if kernel == SDPBackend.CUDNN_ATTENTION:
        out, logsumexp, *_ = aten._scaled_dot_product_cudnn_attention(
            *tensors, None, keep_statistics, NO_DROPOUT, options.causal, False, scale=options.scale
        )
        logsumexp = logsumexp[..., 0] if keep_statistics else None
    elif kernel == SDPBackend.EFFICIENT_ATTENTION:
        out, logsumexp, *_ = aten._scaled_dot_product_efficient_attention(
            *tensors, None, keep_statistics, NO_DROPOUT, options.causal, scale=options.scale
        )
    elif operands.device.type == "cpu":
        out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(
            *tensors, NO_DROPOUT, options.causal, scale=options.scale
        )
    else:
        out, logsumexp, *_ = aten._scaled_dot_product_flash_attention(
            *tensors, NO_DROPOUT, options.causal, False, scale=options.scale
        )
    out = _in_layout(out, options.rows_first)
    if not keep_statistics:
        return [out]
    statistics_BHSM = logsumexp.new_zeros(operands.statistics_shape)
    statistics_BHSM[:, :, 0] = logsumexp[..., : out.shape[2]]
    return [out, statistics_BHSM]


def backward(
    operands: Operands,
    options: AttentionOptions,
    needs_grad: Sequence[bool],
    grad_output: Tensor,
    grad_logsumexp: Tensor | None,
    out: Tensor,
    statistics_BHSM: Tensor,
) -> list[Tensor]:
    """Return the gradients asked for among query, key and value.

    torch's kernels compute all three in any case.
    """
    assert grad_logsumexp is None
    tensors = [readable(each) for each in operands[:3]]
    kernel = _kernel(tensors, options, True)
    if kernel == SDPBackend.CUDNN_ATTENTION:  # see NO_DROPOUT
        like = tensors[0][..., : out.shape[3]]  # values may have fewer features than queries
        out = readable_in(out, torch.empty_like(like, device="meta").stride())
    out = readable(out)
    grad_output = readable_in(grad_output, out.stride())
    given_first = (grad_output, *tensors, out)
    logsumexp_BHM, M, N = statistics_BHSM.sum(2), out.shape[2], tensors[1].shape[2]
    seed: Any = torch.empty(2, dtype=torch.int64, device=out.device)  # read only for dropout
    if kernel == SDPBackend.CUDNN_ATTENTION:
        found = aten._scaled_dot_product_cudnn_attention_backward(
            *given_first, logsumexp_BHM[..., None], seed, seed, None, None, None, M, N,
            NO_DROPOUT, options.causal, scale=options.scale
        )  # fmt: skip
    elif kernel == SDPBackend.EFFICIENT_ATTENTION:
        padded = torch.nn.functional.pad(logsumexp_BHM, (0, -M % PADDED_ROWS), value=torch.inf)
        found = aten._scaled_dot_product_efficient_attention_backward(
            grad_output, *tensors, None, out, padded, seed, seed, NO_DROPOUT,
            [*needs_grad[:3], False], options.causal, scale=options.scale
        )  # fmt: skip
    elif operands.device.type == "cpu":
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *given_first, logsumexp_BHM, NO_DROPOUT, options.causal, scale=options.scale
        )
    else:
        found = aten._scaled_dot_product_flash_attention_backward(
            *given_first, logsumexp_BHM, None, None, M, N, NO_DROPOUT, options.causal, seed, seed,
            scale=options.scale,
        )  # fmt: skip
    return [_in_layout(each, options.rows_first) for each, want in zip(found, needs_grad) if want]


def _kernel(tensors: Sequence[Tensor], options: AttentionOptions, tracked: bool) -> SDPBackend:
    """Return the fused kernel that torch takes for these tensors.

    If torch's settings exclude all fused kernels, it is the one that torch takes with all of them
    allowed.
    """
    query, key, value = (each.detach().requires_grad_(tracked) for each in tensors)
    given = {"is_causal": options.causal, "enable_gqa": query.shape[1] != key.shape[1]}
    found = torch_private.fused_sdp_choice(query, key, value, scale=options.scale, **given)
    if found not in FUSED_NUMBERS:
        with sdpa_kernel(FUSED):
            found = torch_private.fused_sdp_choice(query, key, value, scale=options.scale, **given)
    if found not in FUSED_NUMBERS:
        raise ArgumentError("torch has no kernel of its own for this call here; use backend='torch'")
    return SDPBackend(found)


def _in_layout(tensor_BHMX: Tensor, rows_first: bool) -> Tensor:
    """Return the tensor, or a copy, in the memory layout that `operands.allocate` gives."""
    if rows_first:
        return tensor_BHMX.transpose(1, 2).contiguous().transpose(1, 2)
    return tensor_BHMX.contiguous()
