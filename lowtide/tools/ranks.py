"""Run a command on the ranks that torchrun starts; the first of them reads, writes and prints."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lowtide.tools.errors import UserError

ResultT = TypeVar("ResultT")


def launched() -> bool:
    """Return True in a process that torchrun has started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def world_size() -> int:
    """Return how many ranks torchrun has started, or 1."""
    return int(os.environ["WORLD_SIZE"]) if launched() else 1


def is_first() -> bool:
    """Return True on rank 0, and in a process alone."""
    return not launched() or os.environ["RANK"] == "0"


def tell_torchrun(sentence: str) -> None:
    """Let torchrun's report of an error, behind a traceback of its own, end with this."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        message = {"message": sentence, "extraInfo": {"timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError), open(path, "w") as file:
            json.dump({"message": message}, file)


def check_launched(option: str, example: str, ranks: int = 2) -> None:
    """Raise a UserError where torchrun is missing; `example` is the command with the option."""
    if not launched():
        raise UserError(
            f"{option} needs the ranks of torchrun: torchrun --nproc-per-node={ranks} -m lowtide {example}"
        )


def check_alone(option: str) -> None:
    """Raise a UserError where torchrun has started several ranks, without the option for them."""
    if world_size() > 1:
        raise UserError(
            f"torchrun has started {world_size()} processes, which would each do the same: "
            f"give {option}, or leave torchrun out"
        )


@contextlib.contextmanager
def joined(device: str) -> Iterator[None]:
    """Make the ranks of torchrun the default process group within the block.

    NCCL joins cards, gloo processes on a CPU. A process alone joins nothing.
    """
    if not launched():
        yield
        return
    if not dist.is_available():
        raise UserError("this torch is built without torch.distributed: leave torchrun out")
    card = None
    if device == "cuda":
        place, cards = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if place >= cards:
            raise UserError(
                f"torchrun has started more processes than this machine has cards: "
                f"give --nproc-per-node={cards}, or --device cpu"
            )
        card = torch.device("cuda", place)
        torch.cuda.set_device(card)
    dist.init_process_group("nccl" if card else "gloo", device_id=card)
    ended = False
    try:
        yield
        ended = True
    finally:
        # After an error NCCL would wait for ranks that are in a collective.
        if dist.is_initialized() and (ended or card is None):
            dist.destroy_process_group()


def from_first(run: Callable[[], ResultT]) -> ResultT:
    """Return the result of `run` on rank 0, on all ranks.

    If it fails, only rank 0 raises its error, so that it is told once. The other ranks end without
    one.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return run()
    error: Exception | None = None
    told: list[Any] = [True, None]  # True if rank 0 failed, and the result
    if is_first():
        try:
            told = [False, run()]
        except Exception as raised:
            error = raised
    dist.broadcast_object_list(told)
    failed: bool
    result: ResultT
    failed, result = told
    if failed:
        dist.destroy_process_group()
        if error is None:
            sys.exit(0)
        raise error
    return result
