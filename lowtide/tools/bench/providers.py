"""List every implementation that is measured, and define what an entry of the benchmark is.

They are ours, torch's own and the peers'. `load(case)` imports what the provider needs. It returns
the provider's loss, the mean over the targets that are not ignored, as a function of (input_ND,
weight_VD, target_N). It raises `Unavailable` where the provider cannot run by design; any other
exception, there or later, is a failure. Both become a row that gives the reason.

Legend: N tokens, D features, V classes.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.tools.bench.cases import IGNORE_INDEX, Inputs, LossCase
from lowtide.tools.eager import eager_loss
from lowtide.tools.units import GIB, MIB

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


class Unavailable(Exception):
    """Signal that the provider is not installed or does not support the case."""


class TimedCall(NamedTuple):
    """Hold a call that is ready to be timed."""

    run: Callable[[], tuple[Tensor, ...]]
    leaves: tuple[Tensor, ...]
    """The tensors whose gradients a step computes; empty if `run` returns the gradients as well."""
    upstream: tuple[Tensor, ...] | None = None
    """The gradient of each output; None for a loss that is one number."""
    losses: int = 1
    """The number of the case's losses that it computes; its times are divided by this."""
    exact: bool = True
    """False if its results are known to be wrong, and are not compared with the exact ones."""


class BenchEntry(Protocol):
    """Describe what has a row: a provider, or an option of options.py."""

    @property
    def name(self) -> str: ...
    @property
    def distribution(self) -> str: ...
    @property
    def workspace(self) -> int | None: ...
    def call(self, case: LossCase, inputs: Inputs) -> TimedCall: ...


@dataclass(frozen=True)
class Provider:
    name: str
    distribution: str  # The installed package whose version stands in the provider's rows.
    load: Callable[[LossCase], Loss]
    smoke: bool | None = None
    """Unless named, True runs in smoke runs alone, False outside of them alone, None in both."""
    workspace: int | None = None  # Bytes that it was given, if it has such an option.

    def call(self, case: LossCase, inputs: Inputs) -> TimedCall:
        loss = self.load(case)
        return TimedCall(lambda: (loss(*inputs),), inputs[:2])


class Autocast(Provider):
    """Keep the weight in float32 under autocast: its gradient then is its own accumulator."""

    def call(self, case: LossCase, inputs: Inputs) -> TimedCall:
        input_ND, weight_VD, target_N = inputs
        if case.dtype not in (torch.bfloat16, torch.float16):
            raise Unavailable("autocast is for half precision")
        loss = self.load(case)
        wide_VD = weight_VD.detach().float().requires_grad_(weight_VD.requires_grad)

        def run() -> tuple[Tensor, ...]:
            with torch.autocast(case.device, case.dtype):
                return (loss(input_ND, wide_VD, target_N),)

        return TimedCall(run, (input_ND, wide_VD))


def lowtide_provider(name: str, workspace: int | None, kind: type[Provider] = Provider) -> Provider:
    def load(case: LossCase) -> Loss:
        from lowtide import linear_cross_entropy

        loss = partial(linear_cross_entropy, ignore_index=IGNORE_INDEX, softcap=case.softcap)
        return partial(loss, workspace=workspace, **case.arguments)

    return kind(name, "lowtide", load, smoke=None if kind is Provider else False, workspace=workspace)


def _eager(case: LossCase) -> Loss:
    return partial(eager_loss, softcap=case.softcap)


def _compiled(backend: str, case: LossCase) -> Loss:
    # Code compiled for earlier cases counts towards the limit of recompilations unless it is reset.
    torch.compiler.reset()
    compiled = torch.compile(eager_loss, fullgraph=True, dynamic=False, backend=backend)
    return partial(compiled, softcap=case.softcap)


def _torch_chunked(case: LossCase) -> Loss:
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        raise Unavailable(f"torch {torch.__version__} has no linear_cross_entropy; it came with 2.13")
    _refuse_softcap(case)
    options = torch.nn.LinearCrossEntropyOptions()
    return partial(F.linear_cross_entropy, ignore_index=IGNORE_INDEX, options=options)


def _liger(accum_dtype: torch.dtype | None, case: LossCase) -> Loss:
    module = cuda_module("liger_kernel.transformers.functional", case.device)
    options = {"ignore_index": IGNORE_INDEX, "softcap": case.softcap, "accum_dtype": accum_dtype}
    return partial(module.liger_fused_linear_cross_entropy, **options)


def _cut_cross_entropy(case: LossCase) -> Loss:
    module = cuda_module("cut_cross_entropy", case.device)
    return partial(module.linear_cross_entropy, ignore_index=IGNORE_INDEX, softcap=case.softcap)


def _quack(use_scaled_exp: bool, case: LossCase) -> Loss:
    module = cuda_module("quack.linear_cross_entropy", case.device)
    _refuse_softcap(case)
    loss = partial(module.chunked_linear_cross_entropy, ignore_index=IGNORE_INDEX)
    return partial(loss, use_scaled_exp=use_scaled_exp)


def _refuse_softcap(case: LossCase) -> None:
    if case.softcap is not None:
        raise Unavailable("it has no soft cap")


def cuda_module(name: str, device: str) -> ModuleType:
    """Import a package whose kernels need CUDA, or raise Unavailable."""
    if device != "cuda":
        raise Unavailable("its kernels need CUDA")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        raise Unavailable(f"not installed: {missing}") from None


# The default of a sweep: ours at three workspaces, torch's own, and each peer once.
SWEPT = (
    *("lowtide", "lowtide-3.5GiB", "lowtide-256MiB", "eager", "compile", "torch-chunked"),
    *("liger", "cut-cross-entropy", "quack"),
)

PROVIDERS = (
    lowtide_provider("lowtide", None),
    lowtide_provider("lowtide-3.5GiB", 7 * GIB // 2),
    lowtide_provider("lowtide-1GiB", GIB),
    lowtide_provider("lowtide-1GiB-autocast", GIB, Autocast),
    lowtide_provider("lowtide-256MiB", 256 * MIB),
    lowtide_provider("lowtide-64MiB", 64 * MIB),
    Provider("eager", "torch", _eager),
    # Inductor's first C++ build on a CPU takes about as long as a whole smoke run may. A smoke run
    # uses the backend that generates no code, under that backend's name.
    Provider("compile", "torch", partial(_compiled, "inductor"), smoke=False),
    Provider("compile-aot-eager", "torch", partial(_compiled, "aot_eager"), smoke=True),
    Provider("torch-chunked", "torch", _torch_chunked),
    Provider("liger", "liger-kernel", partial(_liger, None)),
    Provider("liger-fp32", "liger-kernel", partial(_liger, torch.float32)),
    Provider("cut-cross-entropy", "cut-cross-entropy", _cut_cross_entropy),
    Provider("quack", "quack-kernels", partial(_quack, False)),
    Provider("quack-scaled-exp", "quack-kernels", partial(_quack, True)),
)
