"""Measure how long a call keeps the host busy: until Python continues, forward and backward.

On CUDA the device computes meanwhile; each call begins when the device is idle. On the CPU the host
computes. Each of lowtide's operators takes turns with the same in plain torch.

Legend: N tokens, D features, V classes; B sequences of M tokens, H heads of K features.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Group
from torch import Tensor

import lowtide
from lowtide.ops.distillation.api import forward_kl
from lowtide.tools.bench.table import Format, rounded
from lowtide.tools.bench.timing import quantiles
from lowtide.tools.eager import eager_divergence, eager_loss
from lowtide.tools.environment import ENVIRONMENT, dtype_name
from lowtide.tools.tables import new_table

# (N, D, V): few and more tokens at a small head, and at Llama 3's.
SHAPES = {
    "cuda": ((16, 4096, 128256), (256, 1024, 32000), (256, 4096, 128256), (1024, 4096, 128256)),
    "cpu": ((16, 64, 256),),
}
DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}
HEADS = 4  # heads of attention; its sequences have N tokens, and D features over all heads


class TimedAttention(NamedTuple):
    """Hold a call of attention."""

    B: int
    H: int
    M: int
    K: int
    bias: int = 0
    """Batches of a trained bias [1 or B, H, M, M]; 0 for none."""
    causal: bool = False
    tracked: bool = True


# Handed on to torch's kernels; windows of Swin; short sequences with the bias of T5, and with that
# of DeBERTa, which nothing shares; kernels of lowtide for a mask. Batches are few: the host takes
# as long for them as for many.
ATTENTION_CALLS = {
    "cuda": {
        "handed on": TimedAttention(1, 2, 64, 64),
        "handed on, no gradients": TimedAttention(1, 2, 64, 64, tracked=False),
        "windows with a bias": TimedAttention(256, 8, 49, 32, bias=1),
        "windows with a bias, no gradients": TimedAttention(256, 8, 49, 32, bias=1, tracked=False),
        "short sequences with a bias": TimedAttention(16, 16, 512, 64, bias=1),
        "short sequences with a bias each": TimedAttention(16, 12, 512, 64, bias=16),
        "causal with a bias": TimedAttention(4, 16, 256, 64, bias=1, causal=True),
    },
    "cpu": {
        "handed on": TimedAttention(1, 2, 16, 16),
        "windows with a bias": TimedAttention(2, 2, 16, 16, bias=1),
    },
}
WARM, CALLS = 68, 60  # a call that comes often is recorded at its eighth time, attention at its 64th

Run = Callable[[], Tensor]
ComparedCall = tuple[Run, Run, Sequence[Tensor]]
"""An operator's call, the same in plain torch, and the tensors that are trained."""


@dataclass(frozen=True)
class HostRow:
    operator: str
    shape: tuple[int, ...]
    """N, D, V; of attention the tokens and the features of all heads."""
    dtype: torch.dtype
    forward_us: float
    backward_us: float
    eager_forward_us: float
    eager_backward_us: float

    failed = False  # of all rows: an error ends the run


def host_rows(shape: tuple[int, int, int], device: str, calls: int = CALLS) -> Iterator[HostRow]:
    """Measure each operator at this shape, in turn with plain torch; yield each row at once."""
    dtype = DTYPES[device]
    for name, call in operators(*shape, dtype, device).items():
        yield _row(name, shape, call, device, calls)


def attention_host_rows(device: str, calls: int = CALLS) -> Iterator[HostRow]:
    """Measure calls of attention, in turn with torch's function; yield each row at once."""
    for name, case in ATTENTION_CALLS[device].items():
        call = attention(case, DTYPES[device], device)
        yield _row(name, (case.B * case.M, case.H * case.K), call, device, calls)


def _row(name: str, shape: tuple[int, ...], call: ComparedCall, device: str, calls: int) -> HostRow:
    own, eager, leaves = call
    result = own().detach()
    upstream = torch.ones_like(result) if result.dim() else None
    times = [[_once(run, leaves, device, upstream) for run in (own, eager)] for _ in range(WARM + calls)][
        WARM:
    ]
    spans = [
        quantiles([1e6 * each[which][part] for each in times], 0.5)[0] for which in (0, 1) for part in (0, 1)
    ]
    return HostRow(name, shape, DTYPES[device], *spans)


def attention(case: TimedAttention, dtype: torch.dtype, device: str) -> ComparedCall:
    """Return a call by lowtide, the same by torch, and the tensors that are trained."""
    B, H, M, K, biases, causal, tracked = case
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device).to(dtype).requires_grad_(tracked)

    query, key, value = (normal(B, H, M, K) for _ in range(3))
    bias = normal(biases, H, M, M) if biases else None
    leaves = [query, key, value, *(() if bias is None else (bias,))]

    def own() -> Tensor:
        return lowtide.scaled_dot_product_attention(query, key, value, bias, is_causal=causal)

    def eager() -> Tensor:
        hidden = bias
        if causal and bias is not None:  # torch takes one of both
            seen = torch.ones(M, M, dtype=torch.bool, device=device).tril()
            hidden = bias.masked_fill(~seen, -torch.inf)
        plain = causal and bias is None
        return F.scaled_dot_product_attention(query, key, value, hidden, is_causal=plain)

    return own, eager, leaves


def operators(N: int, D: int, V: int, dtype: torch.dtype, device: str) -> dict[str, ComparedCall]:
    """Return for each operator its call, the same in plain torch, and the tensors to be trained."""
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

    divergence = partial(eager_divergence, *head, *teacher, beta=0.0)

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


def _once(run: Run, leaves: Sequence[Tensor], device: str, upstream: Tensor | None) -> tuple[float, float]:
    """Return the seconds of a call, and of its backward, in which the host is busy."""
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    result = run()
    called = time.perf_counter()
    if result.requires_grad:
        result.backward(upstream)
    ended = time.perf_counter()
    for each in leaves:
        each.grad = None
    return called - started, ended - called


TIMES = ("forward_us", "backward_us", "eager_forward_us", "eager_backward_us")


def record(row: HostRow) -> dict[str, object]:
    sizes = {"classes": None, **dict(zip(("tokens", "features", "classes"), row.shape))}
    times = {name: round(getattr(row, name), 1) for name in TIMES}
    return rounded({"operator": row.operator, **sizes, "dtype": dtype_name(row.dtype), **times})


def render(rows: Sequence[HostRow]) -> Group:
    """Return the table of one shape."""
    sizes = ", ".join(f"{name} {size}" for name, size in zip("NDV", rows[0].shape))
    title = sizes if len(rows[0].shape) == 3 else "Attention"
    headings = ("forward", "backward", "eager forward", "eager backward")
    table = new_table(f"{title}: microseconds of the host", ["operator"], headings)
    for row in rows:
        table.add_row(row.operator, *(f"{getattr(row, name):.0f}" for name in TIMES))
    return Group(table)


COLUMNS = (*ENVIRONMENT, "operator", "tokens", "features", "classes", "dtype", *TIMES)
HOST: Any = Format(COLUMNS, record, render)
