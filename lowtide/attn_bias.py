"""Name the masks of :func:`lowtide.memory_efficient_attention` as xformers does."""

from typing import NoReturn

from lowtide.core.errors import AbsentNameError
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

_LOCAL = "pass a causal mask, and window=(window_size - 1, 0) beside it"
_INFERENCE = "masks with padded or paged keys are for inference with a cache, which is not provided"
# What to write in place of masks of xformers. (The page "From xformers" has the same list.)
_INSTEAD_OF = {
    "BlockDiagonalCausalLocalAttentionMask": _LOCAL,
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": _LOCAL,
    "LowerTriangularFromBottomRightLocalAttentionMask": _LOCAL,
    "BlockDiagonalCausalFromBottomRightMask": "pass BlockDiagonalMask, and window=(-1, 0) beside it",
}


def __getattr__(name: str) -> NoReturn:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    padded = any(part in name for part in ("Padded", "Paged", "Gappy"))
    instead = _INSTEAD_OF.get(name, _INFERENCE if padded else f"it has {', '.join(__all__)}")
    raise AbsentNameError(f"lowtide.attn_bias has no {name}; {instead}")
