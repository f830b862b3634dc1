"""What test_vocab_parallel_meshes.py runs in a process of its own: ranks as threads, by the process
group of torch's own tests. A rank costs no start, so there are many meshes and shards; truth is
dense float64.

Shapes: N tokens, D features, V classes of all ranks.
"""

import contextlib
import functools
import json
import sys
import threading
from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    ThreadLocalWorld,
    _install_threaded_pg,
)

import lowtide
from lowtide.ops.linear_cross_entropy.engines.row_loss import RowLoss
from tests.support.budgets import Inputs, dense
from tests.support.loss import make_inputs

SIZES = (1, 2, 3, 5, 6, 8)
MESHES = ((1, 3), (2, 2), (2, 3), (3, 2), (4, 1), (2, 2, 2))


def in_threads(ranks: int, run: Callable[[int], Any]) -> list[Any]:
    """What run(rank) returns on each of the ranks, which are threads."""
    store, found, errors = dist.HashStore(), [None] * ranks, []

    def rank_of(rank: int) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=ranks, store=store)
        try:
            found[rank] = run(rank)
        except BaseException as error:
            errors.append(error)
            ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()

    threads = [threading.Thread(target=rank_of, args=(rank,), daemon=True) for rank in range(ranks)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
        assert not each.is_alive(), "a rank waits for ever"
    ProcessLocalGroup.reset()
    if errors:  # an error of one rank ends the others by SystemExit
        raise next((each for each in errors if isinstance(each, Exception)), errors[0])
    return found


def cuts(random: Random, size: int, ranks: int) -> list[slice]:
    """Random parts, many of them empty."""
    ends = sorted(random.choice((0, size, random.randint(0, size))) for _ in range(ranks - 1))
    return [slice(*each) for each in zip([0, *ends], [*ends, size])]


def drawn(random: Random) -> tuple[Inputs, dict[str, Any]]:
    """A call: its tensors, in float64, and its options."""
    given = {name: True for name in ("bias", "class_weight", "row_weight") if random.random() < 0.4}
    N, D, V = random.randint(1, 14), random.randint(1, 6), random.randint(2, 26)
    torch.manual_seed(random.randrange(1 << 20))
    inputs = make_inputs(N, D, V, dtype=torch.float64, **given)
    options: dict[str, Any] = {"reduction": random.choice(("mean", "sum", "none"))}
    drawn = {"label_smoothing": 0.2, "z_loss": 0.1, "softcap": 3.0}
    options |= {name: value for name, value in drawn.items() if random.random() < 0.4}
    return inputs, options


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11, equal_nan=True)


def cut_of(inputs: Inputs, name: str, part: slice) -> Tensor | None:
    whole = getattr(inputs, name)
    return None if whole is None else whole.detach()[part].clone().requires_grad_(whole.requires_grad)


def truth(inputs: Inputs, options: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    loss = dense(inputs, **options)
    leaves = [name for name in ("input", "linear_weight", "linear_bias") if getattr(inputs, name) is not None]
    found = torch.autograd.grad(loss.sum(), [getattr(inputs, name) for name in leaves])
    return loss.detach(), dict(zip(leaves, found))


def by_group(seed: int) -> None:
    """A rank's own rows with a group: random shards, in any order of ranks, and random tokens."""
    random = Random(seed)
    ranks, (inputs, options) = random.choice(SIZES), drawn(random)
    N, V = inputs.input.shape[0], inputs.linear_weight.shape[0]
    classes, sharded = cuts(random, V, ranks), random.random() < 0.5
    random.shuffle(classes)
    tokens = cuts(random, N, ranks) if sharded else [slice(0, N)] * ranks
    expected, gradients = truth(inputs, options)
    workspace = random.choice((None, 60_000))

    def run(rank: int) -> None:
        mine, rows = classes[rank], tokens[rank]
        x, w, b = (
            cut_of(inputs, name, part)
            for name, part in (("input", rows), ("linear_weight", mine), ("linear_bias", mine))
        )
        loss = lowtide.linear_cross_entropy(
            x, w, inputs.target[rows], linear_bias=b, weight=cut_of(inputs, "weight", mine),
            row_weight=cut_of(inputs, "row_weight", rows), **options, workspace=workspace,
            group=dist.group.WORLD, first_class=mine.start, num_classes=V, tokens_sharded=sharded,
        )  # fmt: skip
        loss.sum().backward()
        close(loss.detach(), expected[rows] if options["reduction"] == "none" else expected)
        close(x.grad, gradients["input"][rows])
        close(w.grad, gradients["linear_weight"][mine])
        if b is not None:
            close(b.grad, gradients["linear_bias"][mine])

    in_threads(ranks, run)


def by_mesh(seed: int) -> None:
    """DTensors on meshes of several dimensions, of which any one divides the classes."""
    random = Random(seed)
    shape, (inputs, options) = random.choice(MESHES), drawn(random)
    place, sharded = random.randrange(len(shape)), random.random() < 0.5
    expected, gradients = truth(inputs, options)

    def run(rank: int) -> None:
        mesh = init_device_mesh("cpu", shape)

        def placed(name: str, on_place: Any) -> Any:
            whole = getattr(inputs, name)
            if whole is None:
                return None
            placements = [Replicate()] * len(shape)
            placements[place] = on_place
            local = whole.detach()
            if on_place.is_shard():
                parts = [*local.chunk(shape[place])]
                own = mesh.get_local_rank(place)
                local = parts[own] if own < len(parts) else local[:0]
            size = {"shape": whole.shape, "stride": whole.stride()}
            made = DTensor.from_local(local.clone(), mesh, placements, run_check=False, **size)
            return made.requires_grad_(whole.requires_grad)

        rows, mine = Shard(0) if sharded else Replicate(), Shard(0)
        x, w, b = placed("input", rows), placed("linear_weight", mine), placed("linear_bias", mine)
        loss = lowtide.linear_cross_entropy(
            x, w, placed("target", rows), linear_bias=b, weight=placed("weight", mine),
            row_weight=placed("row_weight", rows), **options,
        )  # fmt: skip
        local = loss.to_local()
        local.sum().backward()
        for leaf, name in ((x, "input"), (w, "linear_weight"), (b, "linear_bias")):
            if leaf is None:
                continue
            own = gradients[name]
            if leaf.placements[place].is_shard():
                parts = [*own.chunk(shape[place])]
                number = mesh.get_local_rank(place)
                own = parts[number] if number < len(parts) else own[:0]
            close(leaf.grad.to_local(), own)
        if options["reduction"] != "none":
            close(local.detach(), expected)

    in_threads(dist_size(shape), run)


def dist_size(shape: tuple[int, ...]) -> int:
    return functools.reduce(lambda a, b: a * b, shape)


def main(seeds: range) -> None:
    _install_threaded_pg()
    if not hasattr(ThreadLocalWorld, "comms"):  # torch 2.11 forgot what its destroy_process_group reads
        ThreadLocalWorld.comms = property(lambda self: [])
    with FakeTensorMode():  # a CUDA build that finds no card puts a guard in place, which threads must not
        pass
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    # Before Python 3.12 threads share the lock of a cached property, within which ranks wait.
    for each in vars(RowLoss).values():
        if isinstance(each, functools.cached_property) and hasattr(each, "lock"):
            each.lock = contextlib.nullcontext()  # type: ignore[attr-defined]
    failed = []
    for seed in seeds:
        for case in (by_group, by_mesh):
            try:
                case(seed)
            except Exception as error:
                failed.append(f"{case.__name__} {seed}: {type(error).__name__}: {error}")
    print(json.dumps({"count": 2 * len(seeds), "failed": failed}), flush=True)


if __name__ == "__main__":
    main(range(*map(int, sys.argv[1:])))
