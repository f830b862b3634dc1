"""Compute losses of a head or of log-probabilities, without holding the logits.

Losses that take hidden states and a weight run in a bounded workspace. Preference and policy losses
take log-probabilities, [B] or [B, T] numbers; those of a reference or an older policy can be
computed once and stored.

The modules, in the order of imports (a module imports only those above it):

    advice.py      what to pass in place of other packages' arguments
    common.py      checks of shapes and dtypes, and reductions, for losses on log-probabilities
    hidden.py      z_loss and sequence_log_probs, from hidden states
    embeddings.py  info_nce and contrastive, from pairs of embeddings
    policy.py      grpo and its variants, from log-probabilities of sampled tokens
    preference.py  dpo, simpo, orpo and kto, from log-probabilities of sequences

Results are float32, or float64 where an argument is float64. Losses of log-probabilities [B] take
O(B) memory. A shape, device or option that does not fit raises a ValueError; a dtype or type that
does not fit raises a TypeError. Each is also a RuntimeError. The shapes are checked because torch
would broadcast [B] against [B, 1] to [B, B] without an error.

Shapes in all files: B sequences or pairs, T tokens, N = B T, D features, V classes, K keys.
"""

from lowtide.losses.embeddings import contrastive, info_nce
from lowtide.losses.hidden import sequence_log_probs, z_loss
from lowtide.losses.policy import grpo
from lowtide.losses.preference import dpo, kto, orpo, simpo

__all__ = ["contrastive", "dpo", "grpo", "info_nce", "kto", "orpo", "sequence_log_probs", "simpo", "z_loss"]
