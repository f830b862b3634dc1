"""Compute any loss of any head a chunk of rows at a time, as one differentiable scalar.

The caller gives two functions, head and loss_fn; a chunk of rows is in memory at a time, forward
and backward.

Modules, in the order of imports (each imports only those above it):

    functional/      the two functions as a function of tensors alone; FSDP2
    validation.py    errors for arguments and results that do not fit
    accumulate.py    sums over chunks, and float16's range
    isolation.py     a chunk's graph, apart from the caller's hooks and transforms
    operators.py     F.linear and F.cross_entropy, as chunks run them
    replay.py        random numbers and autocast, to compute a chunk again
    job.py           one call; a chunk of its rows, and the loss of that
    loop.py          the loss of each chunk, and its gradients
    higher_order.py  derivatives of any order, torch.func and forward mode
    autograd.py      the two differentiable forms of a call
    chunk_size.py    how many rows fit a workspace
    execute.py       a call, from checked arguments to the loss
    uncompiled.py    execute.run, hidden from torch.compile
    api.py           the public function; its docstring is the contract
"""

from lowtide.ops.chunked_loss.api import chunked_loss

__all__ = ["chunked_loss"]
