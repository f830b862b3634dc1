"""Compute attention and its gradients by the definition: errors are relative to these.

A chunk of batches and queries is computed at a time, in float64, or in float32 without TF32 for
half precision that would take seconds.

Legend: b batches of a chunk; H query heads, G key heads, R = H / G; M queries (m of a chunk), N
keys; K features, E of values; r = R m rows, the query heads of a key head after each other.
"""

import torch
from torch import Tensor

from lowtide.tools.bench.attention.cases import AttentionCase, Inputs
from lowtide.tools.bench.truth import MOST_FLOAT64_FLOPS

SCORES = 1 << 26  # In a chunk.


def truth_dtype(case: AttentionCase) -> torch.dtype:
    """Return float64, or float32 for half precision that would take too much time."""
    too_much = 14 * case.B * case.H * case.M * case.keys * case.K > MOST_FLOAT64_FLOPS
    return torch.float32 if case.dtype.itemsize == 2 and too_much else torch.float64


@torch.no_grad()
def exact(case: AttentionCase, inputs: Inputs) -> tuple[Tensor, ...]:
    """Return what `case.results` names; dropout is left out."""
    wide = truth_dtype(case)
    given = (each.detach().to(wide) if each is not None else None for each in inputs)
    query, key, value, bias, upstream, sink = given
    assert query is not None
    assert key is not None
    assert value is not None
    assert upstream is not None
    out = torch.zeros_like(upstream)
    grad_query, grad_key, grad_value = (torch.zeros_like(each) for each in (query, key, value))
    grad_bias = None if bias is None else torch.zeros_like(bias)
    grad_sink = None if sink is None else torch.zeros_like(sink)
    B, H, M, N, G, scale = case.B, case.H, case.M, case.keys, case.key_heads, case.K**-0.5
    batches = max(1, min(B, SCORES // (H * M * N)))
    step = max(1, SCORES // (batches * H * N))
    chunks = [
        (slice(b, b + batches), slice(i, i + step)) for b in range(0, B, batches) for i in range(0, M, step)
    ]
    for some, rows in chunks:
        key_bGNK, value_bGNE = key[some].transpose(1, 2), value[some].transpose(1, 2)
        query_bGrK, upstream_bGrE = (_by_key_head(each[some, rows], G) for each in (query, upstream))
        z_bHmN = (query_bGrK @ key_bGNK.mT).mul_(scale)
        b, _, r, _ = z_bHmN.shape
        z_bHmN = z_bHmN.view(b, H, r * G // H, N)
        slope_bHmN = None
        if case.softcap:
            z_bHmN.div_(case.softcap).tanh_()
            slope_bHmN = 1 - z_bHmN.square()
            z_bHmN.mul_(case.softcap)
        here = (some, slice(None), rows)
        if bias is not None:
            of_bias = tuple(slice(None) if size == 1 else at for size, at in zip(bias.shape, here))
            z_bHmN += bias[of_bias]
        seen = case.seen(rows)
        if seen is not None:
            z_bHmN.masked_fill_(~seen[some if len(seen) > 1 else slice(None)], -torch.inf)
        lse_bHm1 = z_bHmN.logsumexp(-1, keepdim=True)
        if sink is not None:
            lse_bHm1 = torch.logaddexp(lse_bHm1, sink[:, None, None])
        p_bGrN = z_bHmN.sub_(lse_bHm1).exp_().view(b, G, r, N)
        out_bGrE = p_bGrN @ value_bGNE
        out[some, rows] = _by_query(out_bGrE, H)
        if case.inference:
            continue
        delta_bGr1 = (out_bGrE * upstream_bGrE).sum(-1, keepdim=True)
        dz_bGrN = (upstream_bGrE @ value_bGNE.mT).sub_(delta_bGr1).mul_(p_bGrN)
        dz_bHmN = dz_bGrN.view(b, H, r * G // H, N)
        if grad_bias is not None:
            part = grad_bias[of_bias]
            part += dz_bHmN.sum_to_size(part.shape)
        if grad_sink is not None:
            weight_bHm1 = (sink[:, None, None] - lse_bHm1).exp()  # type: ignore[index]
            grad_sink -= (weight_bHm1 * delta_bGr1.view_as(lse_bHm1)).sum((0, 2, 3))
        if slope_bHmN is not None:
            dz_bHmN.mul_(slope_bHmN)
        grad_query[some, rows] = _by_query(dz_bGrN @ key_bGNK * scale, H)
        grad_key[some] += (dz_bGrN.mT @ query_bGrK * scale).transpose(1, 2)
        grad_value[some] += (p_bGrN.mT @ upstream_bGrE).transpose(1, 2)
    found = (out, grad_query, grad_key, grad_value, grad_bias if case.bias_gradient else None, grad_sink)
    return tuple(each for each in found if each is not None)[: len(case.results)]


def _by_key_head(tensor_bmHK: Tensor, G: int) -> Tensor:
    return tensor_bmHK.transpose(1, 2).unflatten(1, (G, -1)).flatten(2, 3)  # [b, G, r, K]


def _by_query(tensor_bGrK: Tensor, H: int) -> Tensor:
    R = H // tensor_bGrK.shape[1]
    return tensor_bGrK.unflatten(2, (R, -1)).flatten(1, 2).transpose(1, 2)  # [b, m, H, K]
