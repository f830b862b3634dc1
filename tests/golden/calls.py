"""The table. Each engine, way of forming a weight's gradient, option, reduction, derivative and
dtype is in one call at least; sizes and workspaces are such that the call goes the way that its
name says, which `record` prints (and a test checks).
"""

from typing import NamedTuple

import torch

from lowtide import attn_bias
from tests.golden import operators as op
from tests.golden.attention import attention, merged_attention, torchs_attention
from tests.golden.given import BF16, F16, F32, F64, Make

CPU, CUDA, BOTH = ("cpu",), ("cuda",), ("cpu", "cuda")
MIB = 1 << 20


class Call(NamedTuple):
    make: Make
    derivative: str = "gradients"
    devices: tuple[str, ...] = BOTH
    autocast: torch.dtype | None = None
    as_on_a_card: bool = False
    """Whether the CPU is to take the engines of a Hopper card, through Triton's interpreter."""
    deterministic: bool = False
    """Whether torch.use_deterministic_algorithms is on, which our own kernels do not need."""


EVERYTHING = {"bias": True, "class_weight": True, "learned_scale": True, "z_loss": 0.02}

LOSS = {
    # The logits engine, its pass in torch.
    "loss, float32": Call(op.loss(300, 48, 501, bias=True)),
    "loss, float64, all options": Call(
        op.loss(90, 24, 301, F64, **EVERYTHING, softcap=3.0, label_smoothing=0.1, reduction="sum")
    ),
    "loss, each row, in chunks": Call(
        op.loss(640, 48, 501, bias=True, reduction="none", backend="torch", workspace=600_000)
    ),
    "loss, bfloat16, in torch": Call(op.loss(300, 48, 501, BF16, backend="torch", softcap=2.0)),
    "loss, float16": Call(op.loss(300, 48, 501, F16, learned_scale=True, reduction="sum")),
    "loss, split, in torch": Call(op.loss(640, 48, 501, BF16, workspace=400_000), devices=CPU),
    "loss, by class, in torch": Call(op.loss(640, 48, 501, BF16, workspace=200_000), devices=CPU),
    "loss, a transposed weight": Call(op.loss(200, 48, 301, transposed=True, workspace=400_000)),
    "loss, reference": Call(op.loss(60, 24, 101, bias=True, backend="reference")),
    "loss, no gradients": Call(op.loss(300, 48, 501, ignore_index=7), "values"),
    "loss, module": Call(op.loss(80, 24, 101, bias=True, module=True, z_loss=0.01)),
    "loss, autocast": Call(op.loss(200, 48, 301, bias=True), autocast=BF16),
    "loss, compiled": Call(op.loss(200, 48, 301, bias=True, class_weight=True), "compiled"),
    "loss, backward twice": Call(op.loss(200, 48, 301, BF16, bias=True), "gradients_twice"),
    # Positions, terms, probabilities.
    "loss, K dimensions": Call(
        op.loss(40, 24, 61, positions=(2, 3), bias=True, class_weight=True, label_smoothing=0.1)
    ),
    "loss, K dimensions, each row": Call(op.loss(40, 24, 61, positions=(3,), reduction="none")),
    "loss, two terms": Call(op.loss(200, 48, 301, rank=8, bias=True, softcap=3.0)),
    "loss, probabilities": Call(
        op.loss(200, 48, 301, probabilities=F32, class_weight=True, label_smoothing=0.1)
    ),
    "loss, probabilities, each row": Call(
        op.loss(200, 48, 304, BF16, probabilities=BF16, softcap=3.0, reduction="none")
    ),
    "loss, probabilities that are trained": Call(
        op.loss(60, 24, 101, probabilities=F32, tracked_target=True, z_loss=0.01)
    ),
    # Its pass in Triton.
    "loss, triton, all options": Call(
        op.loss(24, 20, 61, **EVERYTHING, softcap=3.0, label_smoothing=0.1, backend="triton")
    ),
    "loss, triton, each row": Call(op.loss(24, 20, 61, reduction="none", backend="triton")),
    "loss, triton, probabilities": Call(
        op.loss(24, 20, 61, probabilities=F32, **EVERYTHING, backend="triton")
    ),
    "loss, triton, by class": Call(op.loss(1024, 128, 4096, F16, workspace=4 * MIB), devices=CUDA),
    # The exponentials, on a CPU with units for bfloat16.
    "loss, CPU exponentials": Call(
        op.loss(200, 256, 4096, BF16, bias=True, class_weight=True, z_loss=0.01), devices=CPU
    ),
    "loss, CPU exponentials, each row": Call(op.loss(200, 256, 4096, BF16, reduction="none"), devices=CPU),
    "loss, CPU exponentials, split": Call(op.loss(200, 256, 4096, BF16, workspace=3 * MIB), devices=CPU),
    "loss, CPU exponentials, by class": Call(op.loss(200, 256, 4096, BF16, workspace=MIB), devices=CPU),
}

# The engines of a Hopper card: on a card, and on the CPU through the interpreter, in tiles that are
# as small.
CARD = {
    "loss, exponentials": Call(op.loss(1024, 128, 2048, BF16, bias=True), devices=CUDA),
    "loss, exponentials, at once": Call(op.loss(128, 128, 4096, BF16), devices=CUDA),
    "loss, exponentials, 24 bits": Call(op.loss(4200, 128, 2048, BF16, workspace=12 * MIB), devices=CUDA),
    "loss, exponentials, 20 bits": Call(op.loss(1024, 128, 4096, BF16, workspace=8 * MIB), devices=CUDA),
    "loss, exponentials, by class": Call(op.loss(1024, 128, 4096, BF16, workspace=3 * MIB), devices=CUDA),
    "loss, exponentials, all options": Call(
        op.loss(512, 128, 2048, BF16, **EVERYTHING, softcap=3.0, reduction="none"), devices=CUDA
    ),
    "loss, exponentials, smoothing": Call(
        op.loss(512, 128, 2048, BF16, class_weight=True, label_smoothing=0.1, reduction="sum"), devices=CUDA
    ),
    "loss, exponentials, two terms": Call(op.loss(1024, 128, 2048, BF16, rank=16), devices=CUDA),
    "loss, exponentials, no gradients": Call(op.loss(512, 128, 2048, BF16), "values", CUDA),
    "loss, distances": Call(op.loss(512, 128, 2048, BF16, probabilities=BF16, bias=True), devices=CUDA),
    "loss, distances, 20 bits": Call(
        op.loss(1024, 128, 4096, BF16, probabilities=BF16, label_smoothing=0.1, workspace=8 * MIB),
        devices=CUDA,
    ),
    "loss, distances, by class": Call(
        op.loss(1024, 128, 4096, BF16, probabilities=BF16, workspace=4 * MIB), devices=CUDA
    ),
    "log-probs, exponentials": Call(op.log_probs(512, 128, 2048, BF16, bias=True, softcap=3.0), devices=CUDA),
    # Products that are large enough for the pipelines.
    "loss, pipelines, 24 bits": Call(op.loss(8192, 4096, 32768, BF16, workspace=512 * MIB), devices=CUDA),
    "loss, pipelines, within a float32 gradient": Call(
        op.loss(8192, 4096, 32768, workspace=512 * MIB), devices=CUDA, autocast=BF16
    ),
    "loss, pipelines, distances": Call(
        op.loss(4096, 4096, 32768, BF16, probabilities=BF16, workspace=1024 * MIB), devices=CUDA
    ),
    "log-probs, pipelines": Call(op.log_probs(4096, 4096, 32768, BF16), devices=CUDA),
    # Interpreted.
    "loss, exponentials, interpreted": Call(
        op.loss(37, 32, 101, **EVERYTHING, softcap=3.0, backend="triton"), devices=CPU, as_on_a_card=True
    ),
    "loss, exponentials, interpreted, each row": Call(
        op.loss(37, 32, 101, class_weight=True, label_smoothing=0.1, reduction="none", backend="triton"),
        devices=CPU,
        as_on_a_card=True,
    ),
    "loss, exponentials, interpreted, at once": Call(
        op.loss(8, 32, 144, BF16, backend="triton"), devices=CPU, as_on_a_card=True
    ),
    "loss, exponentials, interpreted, 24 bits": Call(
        op.loss(70, 32, 144, BF16, workspace=120_000, backend="triton"), devices=CPU, as_on_a_card=True
    ),
    "loss, exponentials, interpreted, 20 bits": Call(
        op.loss(70, 32, 144, BF16, workspace=100_000, backend="triton"), devices=CPU, as_on_a_card=True
    ),
    "loss, exponentials, interpreted, by class": Call(
        op.loss(70, 32, 144, BF16, bias=True, workspace=60_000, backend="triton"),
        devices=CPU,
        as_on_a_card=True,
    ),
    "loss, exponentials, interpreted, two terms": Call(
        op.loss(37, 32, 96, rank=16, backend="triton"), devices=CPU, as_on_a_card=True
    ),
    "loss, distances, interpreted": Call(
        op.loss(37, 24, 112, probabilities=F32, class_weight=True, bias=True, backend="triton"),
        devices=CPU,
        as_on_a_card=True,
    ),
    "loss, distances, interpreted, split": Call(
        op.loss(70, 32, 144, BF16, probabilities=F32, workspace=250_000, backend="triton"),
        devices=CPU,
        as_on_a_card=True,
    ),
    "loss, distances, interpreted, by class": Call(
        op.loss(70, 32, 144, BF16, probabilities=F32, workspace=80_000, backend="triton"),
        devices=CPU,
        as_on_a_card=True,
    ),
    "log-probs, exponentials, interpreted": Call(
        op.log_probs(37, 32, 101, bias=True, backend="triton"), devices=CPU, as_on_a_card=True
    ),
}

LOG_PROBS = {
    "log-probs, float32": Call(op.log_probs(200, 48, 301, bias=True, learned_scale=True, softcap=3.0)),
    "log-probs, bfloat16, in chunks": Call(op.log_probs(640, 48, 501, BF16, workspace=600_000)),
    "log-probs, triton": Call(op.log_probs(24, 20, 61, bias=True, backend="triton")),
}

# Derivatives that the operators do not know: formed from the definition, chunk by chunk.
ALL_SMALL = {**EVERYTHING, "softcap": 3.0, "label_smoothing": 0.1}
DERIVATIVES = {
    "loss, double backward": Call(op.loss(40, 12, 51, F64, **ALL_SMALL), "double_backward"),
    "loss, double backward, each row": Call(op.loss(40, 12, 51, reduction="none"), "double_backward"),
    "loss, jvp": Call(op.loss(40, 12, 51, **ALL_SMALL), "jvp"),
    "loss, vmap(grad)": Call(op.loss(40, 12, 51, bias=True, softcap=3.0), "vmap_of_grad"),
    "loss, hessian": Call(op.loss(3, 4, 7, F64, z_loss=0.1), "hessian"),
    "log-probs, double backward": Call(op.log_probs(40, 12, 51, F64, bias=True), "double_backward"),
    "attention, double backward": Call(
        attention(2, 9, 2, 4, F64, bias=(1, 2, 1, 9), mask=attn_bias.LowerTriangularMask()),
        "double_backward",
    ),
    "attention, handed on, double backward": Call(attention(1, 16, 2, 8), "double_backward"),
    "attention, jvp": Call(attention(2, 9, 2, 4, softcap=3.0), "jvp"),
    "attention, vmap(grad)": Call(torchs_attention((2,), 9, 2, 4, is_causal=True), "vmap_of_grad"),
    "chunked loss, double backward": Call(op.chunked(30, 8, 21, F64, chunk_size=8), "double_backward"),
    "chunked loss, jvp": Call(op.chunked(30, 8, 21, chunk_size=8, mode="recompute"), "jvp"),
    "distillation, double backward": Call(
        op.distill("forward_kl", 30, 8, 21, F64, temperature=1.7), "double_backward"
    ),
}

CAUSAL, FROM_BOTTOM_RIGHT = attn_bias.LowerTriangularMask(), attn_bias.LowerTriangularFromBottomRightMask()
BLOCKS = attn_bias.BlockDiagonalCausalMask.from_seqlens((100, 3, 97))

ATTENTION = {
    # Torch's own kernels.
    "attention, handed on": Call(attention(2, 120, 4, 32), devices=CPU),
    "attention, handed on, causal, key heads": Call(attention(2, 120, 4, 32, G=2, mask=CAUSAL), devices=CPU),
    "attention, handed on, bfloat16": Call(attention(2, 256, 4, 64, BF16), devices=CUDA, deterministic=True),
    "attention, handed on, float16, causal, key heads": Call(
        attention(2, 256, 4, 64, F16, G=2, mask=CAUSAL), devices=CUDA, deterministic=True
    ),
    "attention, handed on, compiled": Call(attention(2, 120, 4, 32, mask=CAUSAL), "compiled", CPU),
    "attention, handed on, bfloat16, compiled": Call(
        attention(2, 256, 4, 64, BF16, mask=CAUSAL), "compiled", CUDA, deterministic=True
    ),
    # Our own: tiles in torch on the CPU, Triton on CUDA.
    "attention, bfloat16, causal": Call(attention(2, 200, 4, 32, BF16, mask=CAUSAL, backend="torch")),
    "attention, float32, E above K": Call(attention(2, 200, 4, 32, E=48)),
    "attention, float64": Call(attention(2, 90, 2, 24, F64, mask=FROM_BOTTOM_RIGHT, N=131)),
    "attention, a bias for each score": Call(attention(2, 200, 4, 32, bias=(2, 4, 200, 200))),
    "attention, a bias for each key": Call(attention(2, 200, 4, 32, G=2, bias=(2, 1, 1, 200), mask=CAUSAL)),
    "attention, a bias for each head and key": Call(attention(2, 200, 4, 32, BF16, bias=(1, 4, 1, 200))),
    "attention, a bias for all heads": Call(attention(2, 200, 4, 32, BF16, bias=(1, 1, 200, 200))),
    "attention, bool mask": Call(attention(2, 200, 4, 32, visible=(2, 1, 200, 200))),
    "attention, sequences": Call(attention(1, 200, 4, 32, BF16, G=2, mask=BLOCKS)),
    "attention, window, soft cap, dropout, logsumexp": Call(
        attention(2, 200, 4, 32, window=(40, 7), softcap=3.0, p=0.2, seed=5, logsumexp=True)
    ),
    "attention, drawn dropout": Call(attention(2, 200, 4, 32, BF16, p=0.3)),
    "attention, many features": Call(attention(1, 200, 2, 320, BF16, bias=(1, 2, 200, 200))),
    "attention, in torch": Call(
        attention(2, 600, 2, 32, mask=CAUSAL, bias=(1, 2, 1, 600), backend="torch", logsumexp=True)
    ),
    "attention, reference": Call(attention(2, 60, 2, 16, bias=(1, 2, 60, 60), backend="reference")),
    "attention, no gradients": Call(attention(2, 200, 4, 32, BF16, window=(30, 30)), "values"),
    "attention, autocast": Call(attention(2, 200, 4, 32, window=(30, 30)), autocast=BF16),
    "attention, compiled": Call(attention(2, 200, 4, 32, bias=(1, 4, 1, 200)), "compiled"),
    "attention, merged": Call(merged_attention(2, 150, 2, 32)),
    "attention, torch's signature": Call(
        torchs_attention((2,), 200, 4, 32, attn_mask=(4, 200, 200), is_causal=True)
    ),
    "attention, torch's signature, bool mask": Call(
        torchs_attention((3, 2), 40, 4, 32, BF16, N=70, G=2, enable_gqa=True, visible=(40, 70))
    ),
    "attention, torch's signature, dropout": Call(torchs_attention((2,), 90, 2, 32, dropout_p=0.2)),
    # Interpreted on the CPU.
    "attention, triton": Call(attention(1, 40, 2, 16, E=24, mask=CAUSAL, backend="triton")),
    "attention, triton, a bias for each score": Call(
        attention(2, 40, 2, 16, bias=(1, 2, 40, 40), backend="triton")
    ),
    "attention, triton, everything": Call(
        attention(
            *(1, 40, 2, 16),
            **{"G": 1, "bias": (1, 2, 1, 40), "softcap": 3.0, "window": (20, 5), "p": 0.3, "seed": 4},
            **{"logsumexp": True, "backend": "triton"},
        )
    ),
    "attention, triton, bfloat16": Call(attention(1, 40, 2, 16, BF16, p=0.2, seed=3, backend="triton")),
}

OTHERS = {
    "chunked loss": Call(op.chunked(200, 24, 101, chunk_size=64, has_aux=True)),
    "chunked loss, bfloat16": Call(op.chunked(200, 24, 101, BF16, chunk_size=64)),
    "chunked loss, float16": Call(op.chunked(200, 24, 101, F16, chunk_size=64)),
    "chunked loss, factors of rows": Call(op.chunked(200, 24, 101, chunk_size=64, tracked_rows=True)),
    "chunked loss, workspace": Call(op.chunked(200, 24, 101, workspace=60_000)),
    "chunked loss, recomputed": Call(op.chunked(200, 24, 101, BF16, chunk_size=64, mode="recompute")),
    "chunked loss, recomputed, each row": Call(
        op.chunked(200, 24, 101, chunk_size=64, per_row=True, mode="recompute")
    ),
    "deferred logits": Call(op.deferred(200, 24, 101, label_smoothing=0.1)),
    "deferred logits, adapter": Call(op.deferred(200, 24, 101, head=op.Adapted, softcap=3.0)),
    "deferred logits, adapter, bfloat16": Call(op.deferred(200, 24, 104, BF16, head=op.Adapted)),
    "deferred logits, log-softmax": Call(op.deferred(200, 24, 101, gathered=True)),
    "distillation, forward": Call(op.distill("forward_kl", 200, 24, 101, bias=True, ignored=True)),
    "distillation, reverse": Call(
        op.distill("reverse_kl", 200, 24, 101, BF16, temperature=1.7, student_softcap=5.0, reduction="sum")
    ),
    "distillation, Jensen-Shannon": Call(
        op.distill("jensen_shannon", 200, 24, 101, beta=0.3, reduction="none")
    ),
    "distillation, by class": Call(
        op.distill("forward_kl", 300, 48, 501, BF16, workspace=300_000), devices=CPU
    ),
    "distillation, by class on a card": Call(
        op.distill("forward_kl", 1024, 128, 4096, BF16, workspace=8 * MIB), devices=CUDA
    ),
    "distillation, interpreted": Call(
        op.distill("reverse_kl", 20, 16, 61, bias=True), devices=CPU, as_on_a_card=True
    ),
    "losses, contrastive": Call(op.contrastive_losses(40, 16)),
    "losses, of hidden states": Call(op.losses_of_hidden_states(4, 11, 16, 61)),
}

CALLS: dict[str, Call] = {**LOSS, **CARD, **LOG_PROBS, **DERIVATIVES, **ATTENTION, **OTHERS}


def calls_on(device: str) -> list[str]:
    return [name for name, call in CALLS.items() if device in call.devices]
