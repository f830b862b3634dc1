"""Define the sizes of a call's chunks and blocks, and the ways to form its weight gradient."""

from dataclasses import dataclass
from typing import Literal

# How a weight gradient is formed: by a single GEMM over all tokens that rounds in its epilogue; by
# adding each chunk's GEMM to a tensor of the sum's dtype; the same with a sum partly in the
# gradient's memory; or by blocks of classes, each rounded once.
WeightGradient = Literal["single_product", "accumulate", "packed", "class_blocks"]


@dataclass(frozen=True)
class Tiling:
    """Hold the sizes of chunks and blocks, and how the weight gradient is formed."""

    rows: int
    """Tokens per chunk."""
    chunk_classes: int
    """Classes of a chunk at a time; V, except in the exponentials engine with "class_blocks"."""
    operand_classes: int
    """Classes whose weight rows are copied at a time; V if no copy is needed."""
    product_rows: int
    """Most rows of one dX GEMM in the exponentials engine."""
    weight_gradient: WeightGradient
    """Names the way to form the first term's weight gradient; those of others are accumulated."""
    sum_bits: int
    """Bits of a sum that lies partly in the gradient's memory ("packed"), on CUDA."""
    block_rows: int = 0
    """Tokens per chunk of a class block ("class_blocks")."""
    block_classes: int = 0
    """Classes per block ("class_blocks")."""
    stored_rows: int = 0
    """Tokens whose exponentials stay in the memory of dW ("class_blocks", exponentials)."""
