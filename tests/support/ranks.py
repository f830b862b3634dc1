"""Two processes of one group, on one machine: started by a test (`run_ranks`), of a module that ends in
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


def run_ranks(module: str, store: Path, kinds: Sequence[str], *options: str) -> list[dict[str, Result]]:
    """What `run` of the module returns, by rank and kind of scenario; `raised` is an error. `options` are
    Python's."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{environment.get('PYTHONPATH', '')}"
    ranks = [
        subprocess.Popen(
            [sys.executable, *options, "-m", module, f"file://{store}", str(rank), *kinds],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        outputs = [rank.communicate(timeout=200) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    found = [[json.loads(line) for line in out.splitlines() if line.startswith("{")] for out, _ in outputs]
    assert all(rank.returncode == 0 for rank in ranks), outputs[0][1] + outputs[1][1]
    assert all(len(each) == len(kinds) for each in found), outputs[0][1] + outputs[1][1]
    return [{each.pop("kind"): each for each in rank} for rank in found]


def as_rank(run: Callable[[str, int], Result]) -> None:
    """Joins the group and prints what run(kind, rank) returns, as JSON, a line for each kind."""
    store, rank, *kinds = sys.argv[1:]
    torch.set_num_threads(1)
    minute = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=store, rank=int(rank), world_size=RANKS, timeout=minute)
    raised = False
    for kind in kinds:
        try:
            result = run(kind, int(rank))
        except (RuntimeError, ValueError, TypeError, AssertionError) as error:
            raised, result = True, {"raised": f"{type(error).__name__}: {error}"}
        print(json.dumps({"kind": kind, **result}), flush=True)
    dist.barrier()
    if raised:
        os._exit(0)  # an error between FSDP's hooks leaves threads behind, which ending orderly trips over
    dist.destroy_process_group()
