"""Name the masks of :func:`lowtide.memory_efficient_attention` as xformers does."""

from lowtide.ops.attention.definition.block_diagonal import BlockDiagonalCausalMask, BlockDiagonalMask
from lowtide.ops.attention.definition.masks import (
    AttentionBias,
    LocalAttentionFromBottomRightMask,
    LowerTriangularFromBottomRightMask,
    LowerTriangularMask,
    LowerTriangularMaskWithTensorBias,
)

__all__ = [
    "AttentionBias",
    "BlockDiagonalCausalMask",
    "BlockDiagonalMask",
    "LocalAttentionFromBottomRightMask",
    "LowerTriangularFromBottomRightMask",
    "LowerTriangularMask",
    "LowerTriangularMaskWithTensorBias",
]
