"""Compute any loss of any head a chunk of rows at a time, as one differentiable scalar.

The caller gives two functions, head and loss_fn; a chunk of rows is in memory at a time, forward
and backward.

The modules, in the order of imports (each imports only those above it):

    constants.py     the constants that the code of the two functions reaches
    validation.py    errors for arguments and results that do not fit
    accumulate.py    sums over chunks, and float16's range
    chunks.py        which rows a chunk has, how many fit, and the state to compute one again
    functional.py    the two functions as a function of tensors alone; FSDP2
    operators.py     F.linear and F.cross_entropy, as chunks run them
    loop.py          the loss of each chunk, and its gradients
    higher_order.py  derivatives of any order, torch.func and forward mode
    autograd.py      the two differentiable forms of a call
    execute.py       a call, from checked arguments to the loss
    uncompiled.py    execute.run, hidden from torch.compile
    api.py           the public function; its docstring is the contract
"""

from lowtide.ops.chunked_loss.api import chunked_loss

__all__ = ["chunked_loss"]
