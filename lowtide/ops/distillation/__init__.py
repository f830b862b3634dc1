"""Compute the divergence between a student's and a teacher's head without the logits of either.

It runs a chunk of rows at a time, in a bounded workspace, with the planning, the walk and the
accumulators of linear_cross_entropy.

The modules, in the order of imports (each imports only those above it):

    heads.py           the tensors of both heads, and the options
    validation.py      errors for arguments that do not fit
    divergences.py     the formulas, and the definition in torch
    planner.py         how the workspace is spent on chunks and blocks
    softmax_torch.py   the pass over a tile of both heads' logits, in torch
    softmax_triton.py  the same pass in Triton
    part_stats.py      merges the statistics of the classes that each rank has
    engine.py          what the loss's walk over chunks calls: both heads' logits, their pass
    ops.py             the registered operators
    higher_order.py    derivatives of any order, forward mode and vmap
    autograd.py        the operators' derivatives
    sharding.py        this rank's tensors, of DTensors or a group
    api.py             the public functions; their docstrings are the contract

An argument that does not fit raises a ValueError or a TypeError, each also a RuntimeError.
"""

from lowtide.ops.distillation.api import forward_kl, jensen_shannon, reverse_kl

__all__ = ["forward_kl", "jensen_shannon", "reverse_kl"]
