"""Accumulate a wide sum over chunks that is rounded to a half-precision weight gradient.

The sum of the first half of the classes lies in the gradient's own memory, that of the others in a
separate tensor (decision 0026).

Shapes: D features, V classes, H in the first half and B in the other; C tokens of a chunk.
"""

import torch
from torch import Tensor

from lowtide.core.matmul import product


class SharedSum:
    """Accumulate a weight gradient, half of it in the gradient's own memory."""

    def __init__(self, gradient_VD: Tensor, factor: Tensor) -> None:
        """Allocate the other half; the gradient will be factor times the sum, in factor's dtype."""
        (V, D), dtype = gradient_VD.shape, factor.dtype
        H = V // 2
        self.gradient_VD, self.factor = gradient_VD, factor
        self.inside_HD = gradient_VD.view(-1)[: 2 * H * D].view(dtype).view(H, D)
        self.beside_BD = torch.empty(V - H, D, dtype=dtype, device=gradient_VD.device)

    @property
    def parts(self) -> list[tuple[slice, Tensor]]:
        """Return each part's classes and its accumulator."""
        V, H = self.gradient_VD.shape[0], self.inside_HD.shape[0]
        return [(slice(0, H), self.inside_HD), (slice(H, V), self.beside_BD)]

    def add_product(self, g_CV: Tensor, x_CD: Tensor, *, first: bool, last: bool) -> None:
        """Add g_CV^T x_CD, or write it for the first chunk."""
        for classes, sum_BD in self.parts:
            product(sum_BD, g_CV[:, classes].t(), x_CD, add=not first)

    def round_in_place(self) -> None:
        """Turn the sum into the gradient, in its own memory."""
        sum_HD, H = self.inside_HD.mul_(self.factor), self.inside_HD.shape[0]
        # Row i is read at byte 4 i D and written at byte 2 i D, so rows n to 2 n are written over
        # rows that have been read already. Row 0 alone overlaps itself, hence the copy.
        self.gradient_VD[: min(H, 1)] = sum_HD[:1].clone()
        first = 1
        while first < H:
            rows = slice(first, min(2 * first, H))
            self.gradient_VD[rows] = sum_HD[rows]
            first = rows.stop
        self.gradient_VD[H:] = self.beside_BD.mul_(self.factor)
