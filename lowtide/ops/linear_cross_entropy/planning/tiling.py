"""Define the sizes of a call's chunks and blocks, and the ways to form its weight gradient."""

from dataclasses import dataclass
from typing import Literal

# How a weight gradient is formed:
#   "single_product"  by a single GEMM over all tokens, which rounds in its epilogue, or on a CPU
#                     from blocks of classes
#   "accumulate"      by adding each chunk's GEMM to a tensor of the sum's dtype
#   "packed"          by adding each chunk's GEMM to a sum that lies partly in the gradient's memory
#   "class_blocks"    a block of classes at a time, over all tokens, rounded once
WeightGradient = Literal["single_product", "accumulate", "packed", "class_blocks"]


@dataclass(frozen=True)
class Tiling:
    """Hold the sizes of chunks and blocks, and how the weight gradient is formed."""

    rows: int
    """Tokens per chunk."""
    chunk_classes: int
    """Classes that a chunk takes at a time: V, except with "class_blocks" in "exponentials"."""
    operand_classes: int
    """Classes whose weight rows are copied at a time; V if no copy is needed."""
    product_rows: int
    """The most rows of one dX GEMM in the exponentials engine."""
    weight_gradient: WeightGradient
    """Names the way to form the first term's weight gradient; those of others are accumulated."""
    sum_bits: int
    """Bits per element of a packed sum on CUDA ("packed")."""
    block_rows: int = 0
    """Tokens per chunk in the walk over class blocks ("class_blocks")."""
    block_classes: int = 0
    """Classes per block ("class_blocks", and "single_product" on a CPU)."""
    stored_rows: int = 0
    """Tokens whose exponentials stay in dW's memory ("class_blocks" in "exponentials")."""
    skips_ignored: bool = False
    """True if rows are put in an order with ignored ones last, before which kernels end."""
