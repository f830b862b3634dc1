"""Processes of one group, on one machine: started by a test (`run_ranks`), of a module that ends in
`as_rank(run)`. What is wrong is known by scenario and by rank.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
RANKS = 2
Result = dict[str, Any]


def run_ranks(
    module: str, store: Path, kinds: Sequence[str], *options: str, ranks: int = RANKS
) -> list[dict[str, Result]]:
    """What `run` of the module returns, by rank and kind of scenario; `raised` is an error. `options` are
    Python's."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{environment.get('PYTHONPATH', '')}"
    processes = [
        subprocess.Popen(
            [sys.executable, *options, "-m", module, f"file://{store}", f"{rank}/{ranks}", *kinds],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=200) for process in processes]
    finally:
        for process in processes:
            process.kill()
    found = [[json.loads(line) for line in out.splitlines() if line.startswith("{")] for out, _ in outputs]
    errors = "".join(error for _, error in outputs)
    assert all(process.returncode == 0 for process in processes), errors
    assert all(len(each) == len(kinds) for each in found), errors
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


def as_rank(run: Callable[[str, int], Result]) -> None:
    """Joins the group and prints what run(kind, rank) returns, as JSON, a line for each kind."""
    store, place, *kinds = sys.argv[1:]
    rank, ranks = map(int, place.split("/"))
    torch.set_num_threads(1)
    minute = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=minute)
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
