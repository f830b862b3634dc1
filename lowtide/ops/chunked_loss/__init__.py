"""Compute any loss of any head, a chunk of rows at a time, as one differentiable tensor.

The caller gives two functions. head takes rows of hidden states and returns their logits, or
anything else. loss_fn takes what head returned and the labels of these rows, or other tensors, and
returns the sum of the rows' losses. The logits of only one chunk of rows exist at a time, in
forward and in backward.

Modules, in the order of imports (each imports only those above it):

    functional/      the two functions as one function of all their tensors; FSDP2
    validation.py    errors for invalid arguments, and for invalid results of the two functions
    accumulate.py    sums over chunks; powers of two that keep float16 gradients in range
    isolation.py     keep a chunk's graph away from the caller's hooks; find active transforms
    operators.py     replacements of F.linear and F.cross_entropy within a chunk
    replay.py        the random numbers and autocast settings of a chunk that is computed again
    job.py           one call: its tensors, its chunks, and the loss of one chunk
    loop.py          the loop over the chunks: their losses and gradients
    higher_order.py  derivatives of any order, torch.func and forward mode
    autograd.py      the autograd functions of the two modes
    chunk_size.py    how many rows fit a workspace
    execute.py       run a call whose arguments are checked
    api.py           the public function; its docstring is the contract
"""

from lowtide.ops.chunked_loss.api import chunked_loss

__all__ = ["chunked_loss"]
