"""Layouts, ways to pass shards, divergences and options of divided heads, held against the dense
truth on all classes and rows.

Shapes: N rows, V classes of all ranks.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from random import Random
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.ops.distillation import helpers
from tests.ops.distillation.helpers import DIVERGENCES, Inputs, check, fused
from tests.support.exchange import of_all_ranks
from tests.support.loss import rows_for
from tests.support.ranks import DEVICE, mesh_of

FEWEST = 13
N, V = FEWEST, 23
# On CUDA a plan counts so much more than on the CPU, for the way in which CUDA allocates.
ROOM_ON_CUDA = 32768 - 8192

LAYOUTS = ("even", "uneven", "empty")
WAYS = ("group", "dtensor", "tokens", "dtensor tokens")
OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum", "temperature": 1.7},
    "none": {"reduction": "none", "temperature": 0.6},
    "caps": {"student_softcap": 3.0, "teacher_softcap": 5.0, "temperature": 1.3},
}


make_inputs: Callable[..., Inputs] = partial(helpers.make_inputs, device=DEVICE)


def small() -> int:
    """Bytes of a workspace for chunks of a few rows."""
    return 30_000 + (ROOM_ON_CUDA if DEVICE == "cuda" else 0) + 128 * (N - FEWEST)


def part_of(size: int, layout: str) -> slice:
    """The classes or rows of this rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    each = -(-size // ranks)  # torch.chunk's
    ends = [min(size, each * (place + 1)) for place in range(ranks)]
    if layout == "uneven":
        ends = [size - (ranks - 1 - place) * 2 for place in range(ranks)]
    if layout == "empty":
        ends = [size] * ranks
    return slice(ends[rank - 1] if rank else 0, ends[rank])


def inputs_of(divergence: str, name: str, dtype: torch.dtype) -> Inputs:
    """The same on all ranks, with NaN in an ignored row."""
    torch.manual_seed(len(divergence) + 7 * len(name))
    inputs = make_inputs(N, 5, V, 4, dtype=dtype, bias=name != "sum")
    assert inputs.ignored is not None
    inputs.ignored[3] = True
    with torch.no_grad():
        inputs.teacher_input[3] = torch.nan
        inputs.student_input[3] = torch.nan
    return inputs


def parts(inputs: Inputs, layout: str, way: str) -> tuple[Inputs, dict[str, Any], slice, slice]:
    """The leaves of a call in a way of passing them; its options; this rank's rows and classes."""
    classes = part_of(V, layout)
    rows = part_of(N, "even" if "dtensor" in way else "uneven") if "tokens" in way else slice(0, N)
    mesh = mesh_of(dist.get_world_size()) if "dtensor" in way else None
    own: dict[str, Tensor] = {}
    for name, whole in inputs.items():
        by_class = "weight" in name or "bias" in name
        part = whole.detach()[classes if by_class else rows].clone()
        if mesh is not None:
            placement = Shard(0) if by_class or "tokens" in way else Replicate()
            size = {"shape": whole.shape, "stride": whole.stride()}
            part = DTensor.from_local(part, mesh, [placement], run_check=False, **size)
        own[name] = part.detach().requires_grad_(whole.requires_grad)
    if mesh is not None:
        return Inputs(**own), {}, rows, classes
    given = {"group": dist.group.WORLD, "first_class": classes.start, "num_classes": V}
    return Inputs(**own), given | {"tokens_sharded": "tokens" in way}, rows, classes


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def joined(own: Tensor) -> Tensor:
    return torch.cat(of_all_ranks(local(own)))


def case(dtype: torch.dtype, layout: str, way: str, divergence: str, name: str, few_rows: bool) -> None:
    options = OPTIONS[name]
    inputs = inputs_of(divergence, name, dtype)
    own, given, rows, _ = parts(inputs, layout, way)
    loss = fused(own, divergence, workspace=small() if few_rows else None, **given, **options)
    assert isinstance(loss, DTensor) == ("dtensor" in way)
    by_row = options.get("reduction") == "none"
    upstream: Any = torch.linspace(-1, 2, N, dtype=torch.float64) if by_row else 2.0
    if by_row:
        factor = upstream[rows].to(loss.dtype)
        if "dtensor" in way:
            mesh, placements = loss.device_mesh, loss.placements
            factor = DTensor.from_local(
                factor, mesh, placements, run_check=False, shape=torch.Size([N]), stride=(1,)
            )
        loss.backward(factor)
    else:
        (loss * upstream).backward()
    actual = {"loss": joined(loss) if by_row and "tokens" in way else local(loss).detach()}
    for key, leaf in own.leaves().items():
        whole_already = key == "student_input" and "tokens" not in way
        actual[key] = local(leaf.grad) if whole_already else joined(leaf.grad)
    ignored = inputs.ignored[:, None]
    names = ("student_input", "teacher_input")
    clean = {name: getattr(inputs, name).detach().masked_fill(ignored, 0) for name in names}
    clean["student_input"].requires_grad_()
    check(actual, replace(inputs, **clean), divergence, upstream, **options)


def matrix(dtype: str) -> dict[str, Any]:
    every = [
        (*each, (number + number // len(OPTIONS)) % 2 == 0)
        for number, each in enumerate(product(LAYOUTS, WAYS, DIVERGENCES, OPTIONS))
        if "dtensor" not in each[1] or each[0] == "even"
    ]
    if dtype != "float64":
        every = Random(0).sample(every, 24)
    elif dist.get_world_size() > 2:
        every = Random(1).sample(every, 48)
    failed = []
    rows = rows_for(DEVICE, getattr(torch, dtype), FEWEST)
    with mock.patch.object(sys.modules[__name__], "N", rows):
        for each in every:
            try:
                case(getattr(torch, dtype), *each)
            except AssertionError as error:
                failed.append(f"{each}: {error}")
    return {"count": len(every), "failed": failed}
