"""The generic chunked loss, from the call down, as imports go.

api.py         the public function; its docstring is the contract
uncompiled.py  the same, out of sight of torch.compile
execute.py         a call's chunks
autograd.py    the two differentiable forms of a call
higher_order.py  the loss as a function of rows: torch.func, forward mode, any order
loop.py        the loss of each chunk and its gradients
functional.py        the caller's two functions as a function of tensors alone; FSDP2
constants.py   what the code of the two functions reaches beside what it is given
operators.py   F.linear and F.cross_entropy, as chunks run them
chunks.py      which rows, how many, and what is kept to compute them again
accumulate.py        sums over chunks; float16's range
validation.py       what a call must look like: one wording for every error
"""

from lowtide.ops.chunked_loss.api import chunked_loss

__all__ = ["chunked_loss"]
