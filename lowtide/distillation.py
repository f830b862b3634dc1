"""Distillation between two heads without the logits of either.

Arguments that do not fit are a ValueError or a TypeError, each also a RuntimeError.
"""

from lowtide.ops.distillation import forward_kl, jensen_shannon, reverse_kl

__all__ = ["forward_kl", "jensen_shannon", "reverse_kl"]
