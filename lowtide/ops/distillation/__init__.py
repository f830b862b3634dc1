"""Compute the divergence between a student's and a teacher's head without the logits of either.

The computation takes a chunk of rows at a time, in a bounded workspace. It uses the planning, the
walk over chunks and the accumulators of linear_cross_entropy.

The modules, in the order of imports (each imports only those above it):

    heads.py           the tensors of both heads, and the options
    validation.py      errors for arguments that do not fit
    divergences.py     the formulas, and the definition in torch
    planner.py         how the workspace is divided among chunks and class blocks
    softmax_torch.py   the pass over a tile of both heads' logits, in torch
    softmax_triton.py  the same pass in Triton
    part_stats.py      merges the row statistics of each rank's classes
    engine.py          the engine: both heads' logits and their pass, for the walk over chunks
    ops.py             the registered operators
    higher_order.py    derivatives of any order, forward mode and vmap
    autograd.py        the operators' derivatives
    sharding.py        this rank's tensors, from DTensors or from plain tensors and a group
    api.py             the public functions; their docstrings are the contract

An argument that does not fit raises a ValueError or a TypeError. Each is also a RuntimeError.
"""

from lowtide.ops.distillation.api import forward_kl, jensen_shannon, reverse_kl

__all__ = ["forward_kl", "jensen_shannon", "reverse_kl"]
