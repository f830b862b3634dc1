"""Compute attention and its gradients by the definition: errors are relative to these.

A chunk of batches and queries is computed at a time, in float64, or in float32 without TF32 for
half precision that would take seconds.

Legend: B batches, H query heads, M queries, N keys, K features.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from lowtide.tools.bench.attention.cases import AttentionCase, Inputs
from lowtide.tools.bench.truth import MOST_FLOAT64_FLOPS
from lowtide.tools.eager import eager_attention

SCORES = 1 << 25  # In a chunk; keys and values that its heads share have no more numbers either.


def truth_dtype(case: AttentionCase) -> torch.dtype:
    """Return float64, or float32 for half precision that would take too much time."""
    too_much = 14 * case.B * case.H * case.M * case.keys * case.K > MOST_FLOAT64_FLOPS
    return torch.float32 if case.dtype.itemsize == 2 and too_much else torch.float64


def exact(case: AttentionCase, inputs: Inputs) -> tuple[Tensor, ...]:
    """Return what `case.results` names; dropout is left out."""
    wide = truth_dtype(case)
    given = {name: each for name, each in inputs._asdict().items() if each is not None}
    trained = [name for name, each in given.items() if each.requires_grad]
    tensors = {name: each.detach().to(wide) for name, each in given.items()}
    upstream = tensors.pop("upstream")
    out, gradients = torch.zeros_like(upstream), {name: torch.zeros_like(tensors[name]) for name in trained}
    for some, rows in _chunks(case):
        places = {"query": (some, rows), "key": some, "value": some, "sink": ...}
        places["bias"] = _of_bias(inputs.bias, some, rows)
        parts = {name: each[places[name]] for name, each in tensors.items()}
        leaves = [parts[name].requires_grad_() for name in trained]
        seen = case.seen(rows)
        hidden = None if seen is None else ~seen[some if len(seen) > 1 else slice(None)]
        part = eager_attention(**parts, hidden=hidden, softcap=case.softcap)
        out[some, rows] = part.detach()
        if leaves:
            found = torch.autograd.grad(part, leaves, upstream[some, rows])
            for name, gradient in zip(trained, found):
                gradients[name][places[name]] += gradient
    return out, *gradients.values()


def _chunks(case: AttentionCase) -> Iterator[tuple[slice, slice]]:
    """Yield the batches and the queries of each chunk."""
    batches = max(1, min(case.B, SCORES // (case.H * case.keys * max(case.M, case.K))))
    queries = max(1, SCORES // (batches * case.H * case.keys))
    for b in range(0, case.B, batches):
        for i in range(0, case.M, queries):
            yield slice(b, b + batches), slice(i, i + queries)


def _of_bias(bias: Tensor | None, some: slice, rows: slice) -> tuple[slice, ...]:
    """Return the place of a chunk's bias, whose sizes of 1 stand for all."""
    sizes = () if bias is None else bias.shape
    return tuple(slice(None) if size == 1 else at for size, at in zip(sizes, (some, slice(None), rows)))
