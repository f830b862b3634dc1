"""What test_doctor.py runs as two processes: calls whose collectives are counted, beside those that
the doctor tells.
"""

from dataclasses import replace

import torch
import torch.distributed as dist

import lowtide
from lowtide.core.collectives import Group
from lowtide.tools.doctor.linear_cross_entropy import AskedLossCall
from tests.ops.linear_cross_entropy.ranks.vocab_parallel_ranks import room
from tests.support.ranks import DEVICE, RANKS
from tests.support.rehearsals import in_rehearsal

PLAIN = AskedLossCall(120, 16, 501, dtype=torch.float32, device=DEVICE, ranks=RANKS)
SMALL = replace(PLAIN, N=1200, workspace=200_000 if DEVICE == "cpu" else 360_000)
REPLICATED = {
    "mean": PLAIN,
    "sum": replace(PLAIN, reduction="sum", bias=True, softcap=5.0, z_loss=1e-4),
    "none": replace(PLAIN, reduction="none"),
    "no gradients": replace(PLAIN, gradients=False),
    "none, no gradients": replace(PLAIN, gradients=False, reduction="none"),
    "smoothing": replace(PLAIN, label_smoothing=0.1),
    "class weights": replace(PLAIN, weight=True),
    "class weights, smoothing": replace(PLAIN, weight=True, label_smoothing=0.1),
    "class weights, none": replace(PLAIN, weight=True, label_smoothing=0.1, reduction="none"),
    "row weights": replace(PLAIN, row_weight=True),
    "bfloat16": replace(PLAIN, dtype=torch.bfloat16),
    "float64": replace(PLAIN, dtype=torch.float64, label_smoothing=0.1),
    "chunks": SMALL,
    "chunks, none": replace(SMALL, reduction="none"),
    "chunks, bfloat16": replace(SMALL, dtype=torch.bfloat16, N=1201),
    "chunks, none, bfloat16": replace(SMALL, dtype=torch.bfloat16, reduction="none"),
    "log-probs": replace(PLAIN, log_probs=True),
    "log-probs, no gradients": replace(PLAIN, log_probs=True, gradients=False),
    "chunks, log-probs": replace(SMALL, log_probs=True, bias=True),
    "segments": replace(PLAIN, V=504, segments=4),
    "segments, smoothing": replace(PLAIN, V=504, segments=8, label_smoothing=0.1),
    "segments, last smaller": replace(PLAIN, V=503, segments=4),
    "chunks, segments, log-probs": replace(SMALL, N=120, V=504, segments=4, log_probs=True),
    "few rows, many classes": replace(SMALL, V=20_001, dtype=torch.bfloat16, workspace=room(600_000)),
}
PROBABILITIES = {
    "probabilities": replace(PLAIN, probabilities=torch.float32),
    "probabilities, smoothing": replace(PLAIN, probabilities=torch.float32, label_smoothing=0.1),
    "probabilities, class weights": replace(PLAIN, probabilities=torch.float32, weight=True),
    "probabilities, none": replace(SMALL, probabilities=torch.float32, reduction="none"),
}
SHARDED = {f"{name}, tokens": replace(each, tokens_sharded=True) for name, each in REPLICATED.items()}
CALLS = REPLICATED | PROBABILITIES | SHARDED


def counted(call, rank):
    """Collectives and the bytes of this rank's part, by kind."""
    found = {}

    def count(kind, method):
        def run(group, tensor):
            if not in_rehearsal():
                times, size = found.get(kind, (0, 0))
                found[kind] = times + 1, size + tensor.nbytes
            return method(group, tensor)

        return run

    kinds = {"gather": "gather", "sum": "sum_", "sum and scatter": "scatter_sum"}
    methods = {name: getattr(Group, name) for name in kinds.values()}
    for kind, name in kinds.items():
        setattr(Group, name, count(kind, methods[name]))
    try:
        issue(call, rank)
    finally:
        for name, method in methods.items():
            setattr(Group, name, method)
    return found


def issue(call, rank):
    first = min(rank * call.own_classes, call.V)
    V = min(call.V - first, call.own_classes)
    N = call.N
    if call.tokens_sharded:
        N = min(call.own_tokens, call.N - rank * call.own_tokens)
    x, w = (torch.zeros(size, call.D, dtype=call.dtype, requires_grad=call.gradients) for size in (N, V))
    target = torch.zeros(N, dtype=torch.long)
    if call.probabilities is not None:
        target = torch.zeros(N, V, dtype=call.probabilities)
    bias = torch.zeros(V, dtype=call.dtype, requires_grad=call.gradients) if call.bias else None
    divided = {
        "group": dist.group.WORLD,
        "first_class": first,
        "num_classes": call.V,
        "tokens_sharded": call.tokens_sharded,
        "segments": call.segments,
        "workspace": call.workspace,
    }
    if call.log_probs:
        found = lowtide.linear_log_probs(x, w, target, linear_bias=bias, **divided)
        if call.gradients:
            found.log_prob.sum().backward()
        return
    loss = lowtide.linear_cross_entropy(
        x,
        w,
        target,
        linear_bias=bias,
        softcap=call.softcap,
        label_smoothing=call.label_smoothing,
        z_loss=call.z_loss,
        weight=torch.ones(V, dtype=call.dtype) if call.weight else None,
        row_weight=torch.ones(N, dtype=call.dtype) if call.row_weight else None,
        reduction=call.reduction,
        **divided,
    )
    if call.gradients:
        loss.sum().backward()


def told(call):
    """What the doctor says, by kind."""
    found = {}
    for each in call.collectives():
        times, size = found.get(each.kind, (0, 0))
        found[each.kind] = times + each.times, size + each.bytes
    return found


def run(kind, rank):
    return {"counted": counted(CALLS[kind], rank), "told": told(CALLS[kind])}
