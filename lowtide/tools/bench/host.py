"""Measure what a call takes of the host: the time until Python goes on, forward and backward.

On CUDA the device computes meanwhile; it is waited for before each call, outside of the time. On
the CPU the host computes. Each of lowtide's operators takes its turn with the same in plain torch.

Legend: N tokens, D features, V classes; B sequences of M tokens, H heads of K features.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from rich import box
from rich.console import Group
from rich.table import Table
from torch import Tensor

import lowtide
from lowtide.ops.distillation.api import forward_kl
from lowtide.tools.bench.measure import quantiles
from lowtide.tools.bench.table import Format, rounded
from lowtide.tools.eager import eager_loss
from lowtide.tools.environment import ENVIRONMENT, dtype_name

# (N, D, V): few and more tokens at a small head, and at Llama 3's.
SHAPES = {
    "cuda": ((16, 4096, 128256), (256, 1024, 32000), (256, 4096, 128256), (1024, 4096, 128256)),
    "cpu": ((16, 64, 256),),
}
DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}
HEADS = 4  # of attention, whose sequences have N tokens and D features in all
WARM, CALLS = 5, 60

Run = Callable[[], Tensor]


@dataclass(frozen=True)
class HostRow:
    operator: str
    shape: tuple[int, int, int]
    dtype: torch.dtype
    forward_us: float
    backward_us: float
    eager_forward_us: float
    eager_backward_us: float

    @property
    def failed(self) -> bool:
        return False


def host_rows(shape: tuple[int, int, int], device: str, calls: int = CALLS) -> list[HostRow]:
    """Measure each operator at this shape, in turn with plain torch."""
    dtype, found = DTYPES[device], []
    for name, (own, eager, leaves) in operators(*shape, dtype, device).items():
        times = [[_once(run, leaves, device) for run in (own, eager)] for _ in range(WARM + calls)][WARM:]
        spans = [
            quantiles([1e6 * each[which][part] for each in times], 0.5)[0]
            for which in (0, 1)
            for part in (0, 1)
        ]
        found.append(HostRow(name, shape, dtype, *spans))
    return found


def operators(
    N: int, D: int, V: int, dtype: torch.dtype, device: str
) -> dict[str, tuple[Run, Run, Sequence[Tensor]]]:
    """Return for each operator a call of it, the same in plain torch, and the tensors that are trained."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int, trained: bool = True, scale: float = 1.0) -> Tensor:
        numbers = torch.randn(size, generator=generator, device=device, dtype=torch.float32) * scale
        return numbers.to(dtype).requires_grad_(trained)

    x_ND, w_VD = normal(N, D), normal(V, D, scale=D**-0.5)
    teacher = normal(N, D, trained=False), normal(V, D, trained=False, scale=D**-0.5)
    target_N = torch.randint(V, (N,), generator=generator, device=device)
    qkv = [normal(1, N, HEADS, max(D // HEADS // 8, 8)) for _ in range(3)]
    summed = partial(F.cross_entropy, reduction="sum")
    chunked = partial(lowtide.chunked_loss, summed, partial(F.linear, weight=w_VD), x_ND, target_N)
    dense = partial(eager_loss, x_ND, w_VD, target_N)
    head = x_ND, w_VD

    def divergence() -> Tensor:
        student, of_teacher = (F.linear(x, w).float().log_softmax(-1) for x, w in (head, teacher))
        return F.kl_div(student, of_teacher, reduction="batchmean", log_target=True)

    def attended(attention: Callable[..., Tensor], transpose: bool) -> Tensor:
        given = [each.transpose(1, 2) for each in qkv] if transpose else qkv
        return attention(*given).sum()

    return {
        "linear_cross_entropy": (partial(lowtide.linear_cross_entropy, *head, target_N), dense, head),
        'linear_cross_entropy, reduction="none"': (
            lambda: lowtide.linear_cross_entropy(*head, target_N, reduction="none").sum(),
            lambda: dense("none").sum(),
            head,
        ),
        "linear_log_probs": (
            lambda: lowtide.linear_log_probs(*head, target_N).log_prob.sum(),
            lambda: dense("sum").neg(),
            head,
        ),
        "distillation.forward_kl": (partial(forward_kl, *head, *teacher), divergence, head),
        "chunked_loss": (partial(chunked, chunk_size=N // 2), partial(dense, "sum"), head),
        "memory_efficient_attention": (
            partial(attended, lowtide.memory_efficient_attention, False),
            partial(attended, F.scaled_dot_product_attention, True),
            qkv,
        ),
    }


def _once(run: Run, leaves: Sequence[Tensor], device: str) -> tuple[float, float]:
    """Return the seconds of a call, and of its backward, in which the host is busy."""
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    loss = run()
    called = time.perf_counter()
    loss.backward()
    ended = time.perf_counter()
    for each in leaves:
        each.grad = None
    return called - started, ended - called


TIMES = ("forward_us", "backward_us", "eager_forward_us", "eager_backward_us")


def record(row: HostRow) -> dict[str, object]:
    sizes = dict(zip(("tokens", "features", "classes"), row.shape))
    times = {name: round(getattr(row, name), 1) for name in TIMES}
    return rounded({"operator": row.operator, **sizes, "dtype": dtype_name(row.dtype), **times})


def render(rows: Sequence[HostRow]) -> Group:
    """Return the table of one shape."""
    N, D, V = rows[0].shape
    table = Table(title=f"N {N}, D {D}, V {V}: microseconds of the host", box=box.SIMPLE_HEAD)
    table.add_column("operator")
    for heading in ("forward", "backward", "eager forward", "eager backward"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row.operator, *(f"{getattr(row, name):.0f}" for name in TIMES))
    return Group(table)


COLUMNS = (*ENVIRONMENT, "operator", "tokens", "features", "classes", "dtype", *TIMES)
HOST: Any = Format(COLUMNS, record, render)
