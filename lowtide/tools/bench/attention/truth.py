"""Compute what attention's benchmark compares with, by the definition.

It takes a chunk of queries of one batch at a time, in float32 without TF32 for half precision, else
in float64.

Legend: H query heads, G key heads, R = H / G; M queries (m of a chunk), N keys, K features; r = R m
rows, the query heads of a key head after each other.
"""

import torch
from torch import Tensor

from lowtide.tools.bench.attention.cases import AttentionCase, Inputs

SCORES = 1 << 26  # In a chunk.


@torch.no_grad()
def exact(case: AttentionCase, inputs: Inputs) -> tuple[Tensor, ...]:
    """Return the result and the gradients of query, key, value and bias; dropout is left out."""
    wide = torch.float32 if case.dtype.itemsize == 2 else torch.float64
    query, key, value, upstream = (each.detach().to(wide) for each in (*inputs[:3], inputs.upstream))
    bias = None if inputs.bias is None else inputs.bias.detach().to(wide)
    out, grad_query, grad_key, grad_value = (torch.zeros_like(each) for each in (query, query, key, value))
    grad_bias = None if bias is None else torch.zeros_like(bias)
    M, G, R, scale = case.M, case.key_heads, case.H // case.key_heads, case.K**-0.5
    step = max(1, SCORES // (case.H * M))
    place_M = torch.arange(M, device=case.device)
    for b in range(case.B):
        key_GNK, value_GNK = key[b].transpose(0, 1), value[b].transpose(0, 1)
        for start in range(0, M, step):
            rows = slice(start, min(start + step, M))
            m = rows.stop - rows.start
            packed = (each[b, rows].unflatten(1, (G, R)).permute(1, 2, 0, 3) for each in (query, upstream))
            query_GrK, upstream_GrK = (each.flatten(1, 2) for each in packed)
            z_HmN = (query_GrK @ key_GNK.mT).mul_(scale).view(case.H, m, M)
            if bias is not None:
                here = (slice(b, b + 1), slice(None), rows)
                own = tuple(slice(None) if size == 1 else at for size, at in zip(bias.shape, here))
                z_HmN += bias[own][0]
            if case.causal:
                z_HmN.masked_fill_(place_M[rows, None] < place_M, -torch.inf)
            p_GrN = z_HmN.softmax(-1).view(G, R * m, M)
            out_GrK = p_GrN @ value_GNK
            delta_Gr1 = (out_GrK * upstream_GrK).sum(-1, keepdim=True)
            dz_GrN = (upstream_GrK @ value_GNK.mT).sub_(delta_Gr1).mul_(p_GrN)
            out[b, rows] = _by_query(out_GrK, R, m)
            grad_query[b, rows] = _by_query(dz_GrN @ key_GNK * scale, R, m)
            grad_key[b] += (dz_GrN.mT @ query_GrK * scale).transpose(0, 1)
            grad_value[b] += (p_GrN.mT @ upstream_GrK).transpose(0, 1)
            if grad_bias is not None:
                part = grad_bias[own]
                part += dz_GrN.view(1, case.H, m, M).sum_to_size(part.shape)
    found = (out, grad_query, grad_key, grad_value)
    return found if grad_bias is None else (*found, grad_bias)


def _by_query(tensor_GrK: Tensor, R: int, m: int) -> Tensor:
    return tensor_GrK.unflatten(1, (R, m)).flatten(0, 1).transpose(0, 1)  # [m, H, K]
