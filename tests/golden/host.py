"""Microseconds that the host takes for small calls of each operator, forward and backward."""

import statistics
import time

import torch

from tests.golden import operators as op
from tests.golden.attention import attention, torchs_attention
from tests.golden.derivatives import gradients
from tests.golden.given import BF16, Given, Make

REPETITIONS, FIRST = 200, 20

SMALL = {
    "linear_cross_entropy, mean": op.loss(16, 16, 64),
    "linear_cross_entropy, mean, bfloat16": op.loss(16, 16, 64, BF16),
    "linear_cross_entropy, none": op.loss(16, 16, 64, reduction="none"),
    "linear_cross_entropy, all options": op.loss(
        16, 16, 64, bias=True, class_weight=True, learned_scale=True, softcap=3.0, z_loss=0.1
    ),
    "linear_log_probs": op.log_probs(16, 16, 64),
    "LinearCrossEntropyLoss": op.loss(16, 16, 64, bias=True, module=True),
    "memory_efficient_attention, handed on": attention(1, 16, 2, 16, BF16),
    "memory_efficient_attention, window": attention(1, 16, 2, 16, BF16, window=(4, 4)),
    "memory_efficient_attention, bias": attention(1, 16, 2, 16, BF16, bias=(1, 2, 16, 16)),
    "scaled_dot_product_attention": torchs_attention((1,), 16, 2, 16, BF16, is_causal=True),
    "chunked_loss": op.chunked(16, 16, 64, chunk_size=8),
    "chunked_loss, recompute": op.chunked(16, 16, 64, chunk_size=8, mode="recompute"),
    "defer_logits": op.deferred(16, 16, 64),
    "distillation.forward_kl": op.distill("forward_kl", 16, 16, 64),
}


def microseconds(device: str) -> dict[str, dict[str, float]]:
    """The median of each call, and the least, which a busy machine disturbs less. The device is
    idle when a call begins, so that the host never waits for it."""
    return {name: _times(name, make, device) for name, make in SMALL.items()}


def _times(name: str, make: Make, device: str) -> dict[str, float]:
    given = Given(name, device)
    function, times = make(given), []
    for _ in range(FIRST + REPETITIONS):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter_ns()
        gradients(function, given.leaves)
        times.append(time.perf_counter_ns() - start)
    counted = times[FIRST:]
    return {"median": statistics.median(counted) / 1000, "least": min(counted) / 1000}
