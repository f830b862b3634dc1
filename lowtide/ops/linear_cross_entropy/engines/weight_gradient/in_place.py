"""A wide sum over chunks that becomes a weight's half-precision gradient: of the first half of the classes in
the gradient's own memory, of the others beside it (decision 0026).

Shapes: D features, V classes, H in the first half and B in the other; C tokens of a chunk.
"""

import torch
from torch import Tensor

from lowtide.core.matmul import product


class SharedSum:
    def __init__(self, gradient_VD: Tensor, factor: Tensor) -> None:
        """The gradient will be factor times the sum, which has factor's dtype."""
        (V, D), dtype = gradient_VD.shape, factor.dtype
        H = V // 2
        self.gradient_VD, self.factor = gradient_VD, factor
        self.inside_HD = gradient_VD.view(-1)[: 2 * H * D].view(dtype).view(H, D)
        self.beside_BD = torch.empty(V - H, D, dtype=dtype, device=gradient_VD.device)

    @property
    def parts(self) -> list[tuple[slice, Tensor]]:
        """Of which classes, and their sum."""
        V, H = self.gradient_VD.shape[0], self.inside_HD.shape[0]
        return [(slice(0, H), self.inside_HD), (slice(H, V), self.beside_BD)]

    def add_product(self, g_CV: Tensor, x_CD: Tensor, *, first: bool, last: bool) -> None:
        for classes, sum_BD in self.parts:
            product(sum_BD, g_CV[:, classes].t(), x_CD, add=not first)

    def round_in_place(self) -> None:
        sum_HD, H = self.inside_HD.mul_(self.factor), self.inside_HD.shape[0]
        # Row i is read at 4 i D bytes and written at 2 i D: rows n to 2 n end where they began.
        self.gradient_VD[: min(H, 1)] = sum_HD[:1].clone()
        first = 1
        while first < H:
            rows = slice(first, min(2 * first, H))
            self.gradient_VD[rows] = sum_HD[rows]
            first = rows.stop
        self.gradient_VD[H:] = self.beside_BD.mul_(self.factor)
