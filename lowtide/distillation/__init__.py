"""Distillation between two heads without the logits of either."""

from lowtide.distillation.api import forward_kl, jensen_shannon, reverse_kl

__all__ = ["forward_kl", "jensen_shannon", "reverse_kl"]
