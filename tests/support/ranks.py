"""Processes of one group, on one machine: started by a test (`run_ranks`), of a module that ends in
`as_rank(run)`. What is wrong is known by scenario and by rank.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
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
    process = subprocess.Popen(
        [sys.executable, *options, "-m", module, str(store), str(ranks), *kinds],
        cwd=ROOT,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, errors = process.communicate(timeout=200)
    finally:
        with suppress(ProcessLookupError):  # where all have ended
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, errors
    outputs = [_output(store, rank).read_text() for rank in range(ranks)]
    found = [[json.loads(line) for line in out.splitlines() if line.startswith("{")] for out in outputs]
    assert all(len(each) == len(kinds) for each in found), errors
    return [{each.pop("kind"): each for each in rank} for rank in found]


def _output(store: Path, rank: int) -> Path:
    return store.with_name(f"{store.name}.{rank}")


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
    """Each rank joins the group and prints what run(kind, rank) returns, as JSON, a line for each kind. The
    ranks are forked off here: what they import takes longer than most scenarios."""

    store, ranks, *kinds = sys.argv[1:]
    processes = []
    for rank in range(int(ranks)):
        process = os.fork()
        if process == 0:
            with open(_output(Path(store), rank), "w") as file:
                os.dup2(file.fileno(), sys.stdout.fileno())
            _join(run, f"file://{store}", rank, int(ranks), kinds)
            return
        processes.append(process)
    statuses = [os.waitpid(process, 0)[1] for process in processes]
    sys.exit(any(statuses))


def _join(run: Callable[[str, int], Result], store: str, rank: int, ranks: int, kinds: Sequence[str]) -> None:
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
