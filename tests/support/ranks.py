"""Processes of one group, on one machine, started by a test (`run_ranks`): each joins the group and
runs `run(kind, rank)` of a module. What is wrong is known by scenario and by rank.

The ranks are on the CPU, joined by gloo, or have a card each, joined by NCCL. There new tensors are
on the card unless they say otherwise; what else asks for a device asks for `DEVICE`.

`start_program` starts a single process from the same server, for a test that asks something of a
process.
"""

import faulthandler
import gc
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
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lowtide.cli import main
from lowtide.core.collectives import is_dtensor
from tests.support import exchange
from tests.support.compiler import leave_out_reports
from tests.support.cuda_context import give_autograd_a_context
from tests.support.seeds import seed_the_cpu_alone

ROOT = Path(__file__).parents[2]
RANKS = 2
needs_gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs torch.distributed with gloo"
)
DEVICE = "cpu"  # the device of this rank's tensors; set it before importing the module with its scenarios
Result = dict[str, Any]
LONGEST = 300  # seconds that a scenario on a card takes before its process says where it is
LIMIT = 400  # seconds that the scenarios of a test take before their processes are killed
# Imported once in each process of tests, by a server that ranks are forked from: these imports take
# longer than most scenarios. Triton asks for its interpreter when it is imported, so ranks that run
# kernels through it have a server of their own.
SERVERS = {interpreted: forkserver.ForkServer() for interpreted in (False, True)}
IMPORTED = [
    "tests.support.uncollected",
    *("lowtide.cli", "lowtide.cli.bench", "lowtide.cli.train", "matplotlib.figure"),
    *("torch._dynamo", "torch._inductor.pattern_matcher"),
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
    device: str = "cpu",
    strict: bool = False,
    interpreted: bool = False,
) -> list[dict[str, Result]]:
    """What `run` of the module returns, by rank and kind of scenario; `raised` is an error.

    strict: a UserWarning is an error. interpreted: with Triton's interpreter.
    """
    outputs = [store.with_name(f"{store.name}.{rank}") for rank in range(ranks)]
    given = [
        (module, str(store), rank, ranks, kinds, device, strict, output)
        for rank, output in enumerate(outputs)
    ]
    statuses = _run(_join, given, interpreted)
    said = [output.read_text().splitlines() for output in outputs]
    found = [[json.loads(line) for line in lines if line.startswith("{")] for lines in said]
    if any(statuses) or any(len(each) != len(kinds) for each in found):
        pytest.fail(_ended(kinds, statuses, said, [len(each) for each in found]), pytrace=False)
    return [{each.pop("kind"): each for each in rank} for rank in found]


def _ended(kinds: Sequence[str], statuses: list[int | None], said: list[list[str]], done: list[int]) -> str:
    """Where each rank ended, if not all of them got to the end, and what it said at last."""
    told = []
    for rank, (status, lines) in enumerate(zip(statuses, said)):
        place = kinds[done[rank]] if done[rank] < len(kinds) else "the end"
        last = [line for line in lines if not line.startswith("{") or '"raised"' in line]
        told += [f"rank {rank} ended with status {status} in {place}; it said at last:", *last[-60:]]
    return "\n".join(told)


def mesh_of(*sizes: int, **options: Any) -> DeviceMesh:
    """A mesh of all ranks, on their device."""
    return init_device_mesh(DEVICE, sizes, **options)


def generator(seed: int) -> torch.Generator:
    """One that makes the same numbers on each rank, for tensors on their device."""
    return torch.Generator(DEVICE).manual_seed(seed)


def whole(tensor: Any) -> Tensor:
    """The tensor, or of a DTensor the parts of all ranks."""
    found: Tensor = tensor.full_tensor() if is_dtensor(tensor) else tensor
    return found


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The whole gradient of each parameter that has one."""
    return {name: whole(each.grad) for name, each in model.named_parameters() if each.grad is not None}


def largest_errors(model: nn.Module, alone: nn.Module) -> dict[str, float]:
    """Of each gradient, over the largest number of the same gradient of a model in one process."""
    found, expected = gradients(model), gradients(alone)
    assert found.keys() == expected.keys(), (sorted(found), sorted(expected))
    return {
        name: ((found[name] - each).abs().max() / each.abs().max()).item() for name, each in expected.items()
    }


def torchrun(directory: Path, *arguments: str, ranks: int = RANKS) -> subprocess.CompletedProcess[str]:
    """`lowtide` with these arguments on ranks like torchrun's, in a directory that has its cache.

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
    function: Callable[..., None], given: Sequence[tuple[Any, ...]], interpreted: bool = False
) -> list[int | None]:
    """Call a function in one process for each rank, and return their statuses."""
    processes = _started(function, given, interpreted)
    end = time.monotonic() + LIMIT
    try:
        for process in processes:
            process.join(max(0, end - time.monotonic()))
    finally:
        for process in processes:
            process.kill()
    return [process.exitcode for process in processes]


def _started(
    function: Callable[..., None], given: Sequence[tuple[Any, ...]], interpreted: bool = False
) -> list[Any]:
    """Start a process per tuple of arguments. The first start the server, in their environment."""
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=function, args=arguments) for arguments in given]
    server = SERVERS[interpreted]
    server.set_forkserver_preload(IMPORTED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forkserver, "connect_to_new_process", server.connect_to_new_process)
        patch.setenv("TRITON_INTERPRET", str(int(interpreted)))
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        # A server that has asked CUDA for its cards could fork no process that uses one; NVML may
        # be asked.
        patch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
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
    _begin(stdout, stderr)
    os.environ.clear()
    os.environ.update(environment)
    exec(program, {"__name__": "__main__"})


def _begin(stdout: Path, stderr: Path) -> None:
    """Send what this process prints to files, and let it collect garbage.

    It collects its own objects only, as rarely as the tests do (conftest.py). Otherwise a fifth of
    a rank's time goes to collections: they go through all that the server has imported, and copy
    the memory that this process shares with it.
    """
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()
    for stream, path in ((sys.stdout, stdout), (sys.stderr, stderr)):
        with open(path, "a") as file:
            os.dup2(file.fileno(), stream.fileno())


def _command(
    directory: Path, arguments: Sequence[str], rank: int, ranks: int, port: int, stdout: Path, stderr: Path
) -> None:
    """Run the command line in the environment of one of torchrun's ranks."""
    _begin(stdout, stderr)
    os.chdir(directory)
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({name: str(value) for name, value in own.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), XDG_CACHE_HOME=str(directory))
    torch.set_num_threads(1)
    sys.argv = ["lowtide", *arguments]
    main()


def _join(
    module: str,
    store: str,
    rank: int,
    ranks: int,
    kinds: Sequence[str],
    device: str,
    strict: bool,
    output: Path,
) -> None:
    """Join the group, and print what `run` returns, as JSON, a line for each kind."""
    _begin(output, output)
    exchange.folder = Path(f"{store}.exchanged")
    exchange.folder.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    leave_out_reports()
    card = _take_card(rank) if device == "cuda" else None
    if card is None:
        seed_the_cpu_alone()
    if strict:
        warnings.simplefilter("error", UserWarning)
    run = importlib.import_module(module).run
    minute = timedelta(seconds=60)
    dist.init_process_group(
        "nccl" if card else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=minute,
        device_id=card,
    )
    raised = False
    for kind in kinds:
        if card:
            faulthandler.dump_traceback_later(LONGEST)
        try:
            result = run(kind, rank)
        except (Exception, pytest.fail.Exception) as error:
            raised, result = True, {"raised": f"{type(error).__name__}: {error}", "at": _last_lines(error)}
        print(json.dumps({"kind": kind, **result}), flush=True)
    faulthandler.cancel_dump_traceback_later()
    dist.barrier()
    if not raised:  # an error between FSDP's hooks leaves threads behind, which this trips over
        dist.destroy_process_group()


def _take_card(rank: int) -> torch.device:
    """Let this process see one card, its own, and make new tensors there.

    What another rank has pickled on its first card is then loaded to this rank's.
    """
    global DEVICE
    DEVICE = "cuda"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    cards = visible.split(",") if visible else [*map(str, range(rank + 1))]
    os.environ.update(CUDA_VISIBLE_DEVICES=cards[rank], LOCAL_RANK="0")
    card = torch.device("cuda", 0)
    torch.cuda.set_device(card)
    torch.set_default_device(card)
    give_autograd_a_context()
    return card


def _last_lines(error: BaseException) -> list[str]:
    """Where an error comes from."""
    return [f"{each.filename}:{each.lineno}" for each in traceback.extract_tb(error.__traceback__)[-5:]]
