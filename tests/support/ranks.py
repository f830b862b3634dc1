"""Processes of one group, on one machine, started by a test (`run_ranks`): each joins the group and runs
`run(kind, rank)` of a module. What is wrong is known by scenario and by rank.
"""

import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
RANKS = 2
Result = dict[str, Any]
# Imported once in each process of tests, by the server that all its ranks are forked from: these imports take
# longer than most scenarios.
IMPORTED = ["lowtide.cli", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"]


def run_ranks(
    module: str,
    store: Path,
    kinds: Sequence[str],
    *,
    ranks: int = RANKS,
    strict: bool = False,
    interpreted: bool = False,
) -> list[dict[str, Result]]:
    """What `run` of the module returns, by rank and kind of scenario; `raised` is an error.

    strict: a UserWarning is an error. interpreted: with Triton's interpreter, in processes of their own.
    """
    outputs = [store.with_name(f"{store.name}.{rank}") for rank in range(ranks)]
    context = multiprocessing.get_context("spawn" if interpreted else "forkserver")
    processes = []
    context.set_forkserver_preload(IMPORTED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", str(int(interpreted)))
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        for rank, output in enumerate(outputs):
            given = (module, str(store), rank, ranks, kinds, strict, output)
            processes.append(context.Process(target=_join, args=given))
            processes[-1].start()
    end = time.monotonic() + 200
    try:
        for process in processes:
            process.join(max(0, end - time.monotonic()))
    finally:
        for process in processes:
            process.kill()
    said = "".join(output.read_text() for output in outputs)
    assert not any(process.exitcode for process in processes), said
    found = [
        [json.loads(line) for line in output.read_text().splitlines() if line.startswith("{")]
        for output in outputs
    ]
    assert all(len(each) == len(kinds) for each in found), said
    return [{each.pop("kind"): each for each in rank} for rank in found]


def torchrun(directory: Path, *arguments: str, ranks: int = RANKS) -> subprocess.CompletedProcess[str]:
    """`lowtide` with these arguments under torchrun, in a directory that also has its cache."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(directory)}
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.run(
        [sys.executable, *launch, "-m", "lowtide", *arguments],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )


def _join(
    module: str, store: str, rank: int, ranks: int, kinds: Sequence[str], strict: bool, output: Path
) -> None:
    """Join the group, and print what `run` returns, as JSON, a line for each kind."""
    with open(output, "w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    torch.set_num_threads(1)
    if strict:
        warnings.simplefilter("error", UserWarning)
    run = importlib.import_module(module).run
    minute = timedelta(seconds=60)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=minute
    )
    raised = False
    for kind in kinds:
        try:
            result = run(kind, rank)
        except (RuntimeError, ValueError, TypeError, AssertionError) as error:
            raised, result = True, {"raised": f"{type(error).__name__}: {error}"}
        print(json.dumps({"kind": kind, **result}), flush=True)
    dist.barrier()
    if raised:
        os._exit(0)  # an error between FSDP's hooks leaves threads behind, which ending orderly trips over
    dist.destroy_process_group()
