"""Name the masks of :func:`lowtide.memory_efficient_attention` as xformers does."""

from typing import TYPE_CHECKING, NoReturn

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

_WINDOW = "window=(window_size - 1, 0) beside it, which counts from the last query and key"
_INFERENCE = "masks with padded or paged keys are for inference with a cache, which is not provided"
# What to write in place of masks of xformers.
_INSTEAD_OF = {
    "BlockDiagonalCausalLocalAttentionMask": (
        f"pass BlockDiagonalCausalMask, and {_WINDOW}; each sequence must have as many keys as queries"
    ),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": f"pass BlockDiagonalMask, and {_WINDOW}",
    "LowerTriangularFromBottomRightLocalAttentionMask": (
        f"pass LowerTriangularFromBottomRightMask, and {_WINDOW}"
    ),
    "BlockDiagonalCausalFromBottomRightMask": "pass BlockDiagonalMask, and window=(-1, 0) beside it",
}

if not TYPE_CHECKING:  # or a type checker would accept any name

    def __getattr__(name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        padded = any(part in name for part in ("Padded", "Paged", "Gappy"))
        instead = _INSTEAD_OF.get(name, _INFERENCE if padded else f"it has {', '.join(__all__)}")
        raise AbsentNameError(f"lowtide.attn_bias has no {name}; {instead}")
