"""Compute attention exactly without holding the matrix of scores, forward or backward.

A call goes from `api` through `dispatch` to one of four backends: torch's own kernels, the Triton
kernels, tiles of BLAS products, or the reference. Under a transform it goes to the definition,
which is computed in chunks of queries (operator/higher_order.py).

The folders and modules, in the order of imports (each imports only those above it):

    definition/      what is computed: masks, layouts, checks, and the reference
    torch_backend/   tiles in plain torch, for any device
    triton_backend/  kernels for CUDA
    sdpa/            torch's own kernels as a backend
    operator/        the registered operators and their derivatives
    delegate.py      call torch's scaled_dot_product_attention where it computes the same
    backend.py       choose the backend of a call, and say why the others do not run it
    remembered.py    run a call that is like an earlier one without checking and choosing again
    dispatch.py      send a call to its backend
    aligned.py       copy operands whose rows begin off 16 bytes
    api.py           the public functions; their docstrings are the contract
    merge.py         merge attention to several sets of keys into attention to all of them
"""

from lowtide.ops.attention.api import (
    memory_efficient_attention,
    memory_efficient_attention_with_lse,
    scaled_dot_product_attention,
)
from lowtide.ops.attention.merge import merge_attentions

__all__ = [
    "memory_efficient_attention",
    "memory_efficient_attention_with_lse",
    "merge_attentions",
    "scaled_dot_product_attention",
]
