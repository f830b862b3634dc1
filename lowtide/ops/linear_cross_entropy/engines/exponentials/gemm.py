"""Tiles of the logits of a chunk that leave as exponentials: which kernel makes them, and how it is launched.

Shapes: C tokens of a chunk, D features, R of a second, narrow term; B classes of a block, or all."""

import math
from functools import cached_property
from typing import Any

import torch
import triton
from torch import Tensor

from lowtide.core import backend
from lowtide.ops.linear_cross_entropy.engines.exponentials import gemm_triton as kernels
from lowtide.ops.linear_cross_entropy.engines.gemm.triton import describe, multiprocessors

Term = tuple[Tensor, Tensor]


def halves_of_tiles(classes: int) -> int:
    return 2 * triton.cdiv(classes, kernels.BLOCK_B)


class Exponentials:
    """Of one chunk and one block of classes: run once or more."""

    def __init__(
        self,
        first_term: Term,
        second_term: Term | None = None,
        *,
        reference_C: Tensor,
        target_C: Tensor,
        out_CB: Tensor | None,
        bias_B: Tensor | None = None,
        scale: Tensor | None = None,
        softcap: float = 0.0,
        pull_C: Tensor | None = None,
        tilt_C: Tensor | None = None,
        factor_C: Tensor | None = None,
        first_class: int = 0,
    ) -> None:
        (self.C, self.D), (self.B, _) = (tensor.shape for tensor in first_term)
        self.terms = (first_term, second_term)
        self.exp_CB: Any = out_CB
        self.classes = slice(first_class, first_class + self.B)
        self.softcap = softcap
        self.device = reference_C.device
        self.of_call = {
            "reference_C_ptr": reference_C,
            "target_C_ptr": target_C,
            "bias_B_ptr": bias_B,
            "scale_ptr": scale,
            "pull_C_ptr": pull_C,
            "tilt_C_ptr": tilt_C,
            "factor_C_ptr": factor_C,
            **{"C": self.C, "B": self.B, "D": self.D, "first_class": first_class},
        }

    def partials(self, dtype: torch.dtype = torch.float32, *, memory: Tensor | None = None) -> Tensor:
        """[halves of tiles, C]: what the kernel finds in each."""
        size = halves_of_tiles(self.B), self.C
        if memory is None:
            return torch.empty(*size, dtype=dtype, device=self.device)
        return memory.view(-1).view(dtype)[: math.prod(size)].view(size)

    def run(
        self,
        *,
        sums: Tensor | None = None,
        means: Tensor | None = None,
        moments: Tensor | None = None,
        maxima: Tensor | None = None,
        places: Tensor | None = None,
        repair: Tensor | None = None,
        guarded: bool = True,
    ) -> None:
        """Fills the partials that are given, of the row tiles that `repair` marks (of all without it), and
        stores E where there is a place for it. Sums and moments of a block of classes are added to what those
        before it have left. Not `guarded`, an ignored row whose logits are not finite has a NaN for its sum,
        to be repaired, and a row with an infinite logit some other place for its maximum."""
        programs = multiprocessors(self.device)
        arguments: dict[str, Any] = {
            **self.of_call,
            "sum_ptr": sums,
            "mean_ptr": means,
            "moment_ptr": moments,
            "max_ptr": maxima,
            "argmax_ptr": places,
            "STORE": self.exp_CB is not None,
            "GUARDED": guarded,
            "ADD": self.classes.start > 0 and (sums is not None or moments is not None),
            "PROGRAMS": programs,
            "GROUP": kernels.GROUP,
        }
        # With a soft cap a step took a tenth longer on the pipeline (decision 0039).
        large = backend.worth(self.C, self.B, self.D) and self.softcap == 0
        if repair is None and large and backend.pipelines_on(self.device):
            from lowtide.ops.linear_cross_entropy.engines.exponentials import gemm_gluon
            from lowtide.ops.linear_cross_entropy.engines.gemm import gluon

            gemm_gluon.exponentials_kernel[(programs,)](
                **self._tiles_of(gluon.describe, gluon.BLOCK_A // 2),
                **arguments,
                STAGES=gluon.STAGES,
                REGISTERS=gluon.REGISTERS,
                num_warps=gluon.WARPS,
            )
            return
        kernels.exponentials_kernel[(programs,)](
            **self._tiles,
            **arguments,
            SOFTCAP=self.softcap,
            # The branch that spares most halves a comparison (dearer than an exponential) takes registers.
            MASKED=self.softcap > 0 and moments is not None,  # decision 0012
            repair_ptr=repair,
            REPAIR=repair is not None,
            BLOCK_C=kernels.BLOCK_C,
            BLOCK_B=kernels.BLOCK_B,
            BLOCK_D=kernels.BLOCK_D,
            num_stages=kernels.STAGES,
            num_warps=kernels.WARPS,
        )

    @cached_property
    def _tiles(self) -> dict[str, Any]:
        return self._tiles_of(describe, kernels.BLOCK_C)

    def _tiles_of(self, describe: Any, rows: int) -> dict[str, Any]:
        names = (("x_CD", "weight_BD"), ("x_CR", "weight_BR"))
        heights, depth = (rows, kernels.BLOCK_B), kernels.BLOCK_D
        tiles = {
            name: None if term is None else describe(tensor, height, depth)
            for of_term, term in zip(names, self.terms)
            for name, tensor, height in zip(of_term, term or (None, None), heights)
        }
        out = None if self.exp_CB is None else describe(self.exp_CB, rows, kernels.BLOCK_B // 2)
        return {**tiles, "exp_CB": out}
