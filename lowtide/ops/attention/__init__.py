"""Compute attention exactly without holding the matrix of scores, forward or backward.

A call goes from `api` through `dispatch` to one of four backends: torch's own kernels, Triton,
tiles of BLAS products, or the reference.

The folders and modules, in the order of imports (each imports only those above it):

    definition/      what is computed: masks, layouts, checks, and the reference
    torch_backend/   tiles in plain torch, for any device
    triton_backend/  kernels for CUDA
    sdpa/            torch's own kernels as a backend
    operator/        the registered operators and their derivatives
    delegate.py      the plain case, handed to torch's scaled_dot_product_attention
    backend.py       which backend takes a call, and why not the others
    remembered.py    calls like earlier ones, handed on to torch or to the Triton kernels by one check
    dispatch.py      a call, sent to its backend
    api.py           the public functions; their docstrings are the contract
    merge.py         attention to several sets of keys, merged into one
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
