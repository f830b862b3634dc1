"""Processes of one group, on one machine, started by a test (`run_ranks`): each joins the group and runs
`run(kind, rank)` of a module. What is wrong is known by scenario and by rank.

`start_program` starts a single process from the same server, for a test that asks something of a process.
"""

import importlib
import itertools
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lowtide.cli import main

ROOT = Path(__file__).parents[2]
RANKS = 2
Result = dict[str, Any]
# Imported once in each process of tests, by the server that all its ranks are forked from: these imports take
# longer than most scenarios.
IMPORTED = [
    "lowtide.cli",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "transformers.models.llama.modeling_llama",  # where it is installed
]


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
    given = [(module, str(store), rank, ranks, kinds, strict, output) for rank, output in enumerate(outputs)]
    statuses = _run(_join, given, "spawn" if interpreted else "forkserver", interpreted)
    said = "".join(output.read_text() for output in outputs)
    assert not any(statuses), said
    found = [
        [json.loads(line) for line in output.read_text().splitlines() if line.startswith("{")]
        for output in outputs
    ]
    assert all(len(each) == len(kinds) for each in found), said
    return [{each.pop("kind"): each for each in rank} for rank in found]


def torchrun(directory: Path, *arguments: str, ranks: int = RANKS) -> subprocess.CompletedProcess[str]:
    """`lowtide` with these arguments on ranks like those of torchrun, in a directory that has its cache, too.

    Examples are run by torchrun itself (tests/distributed/test_examples.py).
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    outputs = [(directory / f"stdout.{rank}", directory / f"stderr.{rank}") for rank in range(ranks)]
    given = [(directory, arguments, rank, ranks, port, *outputs[rank]) for rank in range(ranks)]
    statuses = _run(_command, given)
    stdout, stderr = ("".join(output.read_text() for output in each) for each in zip(*outputs))
    for output in itertools.chain.from_iterable(outputs):
        output.unlink()
    return subprocess.CompletedProcess(arguments, int(any(statuses)), stdout, stderr)


def _run(
    function: Callable[..., None],
    given: Sequence[tuple[Any, ...]],
    method: str = "forkserver",
    interpreted: bool = False,
) -> list[int | None]:
    """Call a function in one process for each rank, and return their statuses."""
    processes = _started(function, given, method, interpreted)
    end = time.monotonic() + 200
    try:
        for process in processes:
            process.join(max(0, end - time.monotonic()))
    finally:
        for process in processes:
            process.kill()
    return [process.exitcode for process in processes]


def _started(
    function: Callable[..., None],
    given: Sequence[tuple[Any, ...]],
    method: str = "forkserver",
    interpreted: bool = False,
) -> list[Any]:
    """Start a process for each tuple of arguments. The first start the server, with their environment."""
    context: Any = multiprocessing.get_context(method)
    context.set_forkserver_preload(IMPORTED)
    processes = [context.Process(target=function, args=arguments) for arguments in given]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", str(int(interpreted)))
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        for process in processes:
            process.start()
    return processes


def start_program(
    directory: Path, program: str, environment: dict[str, str]
) -> Callable[[], tuple[int, str, str]]:
    """Start a program in a process where lowtide is imported, and nothing has been called.

    The function that is returned waits for it: its status, and what it wrote to stdout and stderr.
    """
    folder = Path(tempfile.mkdtemp(dir=directory))
    outputs = folder / "stdout", folder / "stderr"
    (process,) = _started(_program, [(program, environment, *outputs)])

    def finish() -> tuple[int, str, str]:
        process.join(200)
        process.kill()
        process.join()
        stdout, stderr = (output.read_text() for output in outputs)
        return process.exitcode, stdout, stderr

    return finish


def _program(program: str, environment: dict[str, str], stdout: Path, stderr: Path) -> None:
    """Run a program with this environment alone."""
    _write_to(stdout, stderr)
    os.environ.clear()
    os.environ.update(environment)
    exec(program, {"__name__": "__main__"})


def _write_to(stdout: Path, stderr: Path) -> None:
    """Send what this process prints to files."""
    for stream, path in ((sys.stdout, stdout), (sys.stderr, stderr)):
        with open(path, "a") as file:
            os.dup2(file.fileno(), stream.fileno())


def _command(
    directory: Path, arguments: Sequence[str], rank: int, ranks: int, port: int, stdout: Path, stderr: Path
) -> None:
    """Run the command line in the environment of one of torchrun's ranks."""
    _write_to(stdout, stderr)
    os.chdir(directory)
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({name: str(value) for name, value in own.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), XDG_CACHE_HOME=str(directory))
    torch.set_num_threads(1)
    sys.argv = ["lowtide", *arguments]
    main()


def _join(
    module: str, store: str, rank: int, ranks: int, kinds: Sequence[str], strict: bool, output: Path
) -> None:
    """Join the group, and print what `run` returns, as JSON, a line for each kind."""
    _write_to(output, output)
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
