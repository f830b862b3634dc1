"""Distil one head into another without the logits of either.

An argument that does not fit raises a ValueError or a TypeError, each also a RuntimeError.
"""

from lowtide.ops.distillation import forward_kl, jensen_shannon, reverse_kl

__all__ = ["forward_kl", "jensen_shannon", "reverse_kl"]
