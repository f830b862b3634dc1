r"""Losses whose logits are never held, each a few lines over :func:`lowtide.linear_cross_entropy` or
:func:`lowtide.linear_log_probs`.

What meets a head (`contrastive`, `info_nce`, `z_loss`, `sequence_log_probs`) takes hidden states and a weight
and keeps to a workspace. The preference and policy losses are functions of log-probabilities, [B] or [B, T]
numbers: those of a reference or of an older policy can be computed once, anywhere, and stored.

The results are float32, or float64 where an argument is. Shapes that do not fit are a ValueError, dtypes a
TypeError, each also a RuntimeError: [B] beside [B, 1] would otherwise quietly become [B, B].

In all files: B sequences or pairs, T tokens, N = B T, D features, V classes, K keys.
"""

from lowtide.losses.embeddings import contrastive, info_nce
from lowtide.losses.hidden import sequence_log_probs, z_loss
from lowtide.losses.policy import grpo
from lowtide.losses.preference import dpo, kto, orpo, simpo

__all__ = ["contrastive", "dpo", "grpo", "info_nce", "kto", "orpo", "sequence_log_probs", "simpo", "z_loss"]
