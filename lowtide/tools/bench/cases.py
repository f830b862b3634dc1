"""Define the shapes of the benchmark as data, and the tensors of one shape.

Legend: N tokens, D features, V classes.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowtide.tools.environment import dtype_name

IGNORE_INDEX = -100

AXES = ("tokens", "classes", "features")
FACTORS = (1 / 8, 1 / 4, 1 / 2, 1, 2)

Inputs = tuple[Tensor, Tensor, Tensor]  # input_ND, weight_VD, target_N


class Mode(str, Enum):
    STEP = "step"  # Loss, and gradients of input and weight.
    FORWARD = "forward"  # Loss alone, without gradients.


@dataclass(frozen=True)
class LossCase:
    name: str
    tokens: int
    features: int
    classes: int
    dtype: torch.dtype
    device: str
    smoke: bool = False
    logits: str = "random"
    largest_logit: float | None = None  # None for random logits.
    softcap: float | None = None
    ignored: float = 0.0  # The share of the tokens whose targets are ignored.
    heads: int = 1  # The heads of this shape whose logits the loss needs: two with a teacher's.
    seed: int = 0  # That of hidden states, head and targets.
    ranks: int = 1
    """The ranks that the classes are divided over, with `rank` the place of this one."""
    rank: int = 0
    tokens_divided: bool = False
    """Whether each rank has `tokens` of its own, as under FSDP2; else all have the same."""
    by_name: bool = False  # It runs where it is named, and not where all do.

    @property
    def shape(self) -> str:
        shape = f"{self.tokens} x {self.features} x {self.classes} {dtype_name(self.dtype)} on {self.device}"
        if self.tokens_divided:
            return shape + f", tokens of each of {self.ranks} ranks"
        return shape + f", classes over {self.ranks} ranks" * (self.ranks > 1)

    @property
    def own_classes(self) -> slice:
        """Return the classes of this rank, by the rule of torch.chunk."""
        size = -(-self.classes // self.ranks)
        return slice(min(self.rank * size, self.classes), min((self.rank + 1) * size, self.classes))

    @property
    def own_tokens(self) -> slice:
        """Return this rank's tokens among those of `inputs`."""
        first = self.rank * self.tokens if self.tokens_divided else 0
        return slice(first, first + self.tokens)

    @property
    def arguments(self) -> dict[str, Any]:
        """Return what tells lowtide that the classes are divided."""
        if self.ranks == 1:
            return {}
        return {"group": dist.group.WORLD, "first_class": self.own_classes.start, "num_classes": self.classes}

    def inputs(self, requires_grad: bool) -> Inputs:
        """Return hidden states, head and targets, equal in every run; logits have unit variance.

        They are those of all classes and all tokens, also where these are divided. Each rank's
        tokens have the same number of targets that count.
        """
        on = {"device": self.device, "generator": torch.Generator(self.device).manual_seed(self.seed)}
        N = self.tokens * self.ranks if self.tokens_divided else self.tokens
        input_ND = torch.randn(N, self.features, dtype=self.dtype, **on)
        weight_VD = torch.randn(self.classes, self.features, dtype=self.dtype, **on)
        weight_VD.mul_(self.features**-0.5)
        target_N = torch.randint(self.classes, (N,), **on)
        by_rank = target_N.split(self.tokens)
        target_N = torch.cat([with_ignored(each, on["generator"], self.ignored) for each in by_rank])
        return input_ND.requires_grad_(requires_grad), weight_VD.requires_grad_(requires_grad), target_N


def with_ignored(target_N: Tensor, generator: torch.Generator, share: float) -> Tensor:
    order_N = torch.randperm(len(target_N), device=target_N.device, generator=generator)
    target_N[order_N[: int(len(target_N) * share)]] = IGNORE_INDEX
    return target_N


def sweep(center: LossCase, axes: Collection[str]) -> list[LossCase]:
    """Return the shapes along each axis through a center; the center occurs once."""
    cases = {}
    for axis in axes:
        for size in (int(getattr(center, axis) * factor) for factor in FACTORS):
            case = center
            if size != getattr(center, axis):
                changed: dict[str, Any] = {axis: size, "name": f"{center.name}-{axis}-{size}"}
                case = replace(center, **changed)
            cases[case.name] = case
    return list(cases.values())


def divided(case: LossCase, *, tokens: bool = False) -> LossCase:
    """Return the case with its classes divided over the ranks of the default process group.

    With `tokens` each rank has as many tokens as the case.
    """
    ranks = dist.get_world_size()
    name = f"{case.name}-{'fsdp' if tokens else 'tp'}{ranks}"
    return replace(case, name=name, ranks=ranks, rank=dist.get_rank(), tokens_divided=tokens)


def own_inputs(case: LossCase, whole: Inputs) -> Inputs:
    """Return the inputs with this rank's rows of the head, or its tokens and the whole head."""
    input_ND, weight_VD, target_N = whole
    if case.tokens_divided:
        own_ND = input_ND.detach()[case.own_tokens].clone()
        return own_ND.requires_grad_(input_ND.requires_grad), weight_VD, target_N[case.own_tokens].clone()
    if case.ranks > 1:
        own_VD = weight_VD.detach()[case.own_classes].clone()
        weight_VD = own_VD.requires_grad_(weight_VD.requires_grad)
    return input_ND, weight_VD, target_N


def own_results(case: LossCase, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the results with this rank's rows of dX and dW alone; all ranks have the same loss.

    Where tokens are divided, dX is that of the rank's own loss, and the loss the mean of the
    ranks'.
    """
    scale = case.ranks if case.tokens_divided else 1
    grads = (grad_ND[case.own_tokens] * scale for grad_ND in results[1:2])
    return (*results[:1], *grads, *(grad_VD[case.own_classes] for grad_VD in results[2:]))


def with_mean_loss(case: LossCase, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return this rank's results with the mean of the ranks' losses, where tokens are divided."""
    if not case.tokens_divided:
        return results
    loss = results[0].clone()
    dist.all_reduce(loss)
    return (loss / case.ranks, *results[1:])


CASES = (
    LossCase("A", 16384, 2048, 131072, torch.bfloat16, "cuda"),
    LossCase("B", 16384, 4096, 128256, torch.bfloat16, "cuda"),
    LossCase("C", 8192, 2304, 256000, torch.bfloat16, "cuda"),
    LossCase("D", 32768, 4096, 128256, torch.bfloat16, "cuda"),
    LossCase("B-4096", 4096, 4096, 128256, torch.bfloat16, "cuda", by_name=True),
    LossCase("B-8192", 8192, 4096, 128256, torch.bfloat16, "cuda", by_name=True),
    # With --tp 2, each of two cards has as many classes as each of eight cards has in B.
    LossCase("B-classes-32064", 16384, 4096, 32064, torch.bfloat16, "cuda", by_name=True),
    LossCase("B-1024", 1024, 4096, 128256, torch.bfloat16, "cuda"),
    LossCase("B-2048", 2048, 4096, 128256, torch.bfloat16, "cuda"),
    LossCase("smoke-cuda", 512, 256, 2048, torch.bfloat16, "cuda", smoke=True),
    LossCase("cpu", 2048, 512, 32768, torch.float32, "cpu"),
    LossCase("cpu-bf16", 2048, 512, 32768, torch.bfloat16, "cpu"),
    LossCase("cpu-small", 512, 256, 8192, torch.float32, "cpu"),
    LossCase("smoke-cpu", 256, 64, 1024, torch.float32, "cpu", smoke=True),
)
