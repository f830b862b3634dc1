"""Files that are either whole or not there: a process may be killed at any instruction."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch


class DamagedFile(Exception):
    pass


@contextlib.contextmanager
def whole_file(path: Path, mode: str = "wb") -> Iterator[IO[Any]]:
    """A file to write to, which takes the place of `path` when the block ends, and not when it fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same directory, because a rename is atomic only within one file system.
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(unfinished, mode) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def load(path: Path) -> dict:
    """The dictionary that `torch.save` wrote: tensors on the CPU, and nothing in the file is executed."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as problem:  # a damaged file can fail anywhere in zip, pickle or torch
        raise DamagedFile(f"{path} is damaged") from problem
    if not isinstance(content, dict):
        raise DamagedFile(f"{path} holds something else")
    return content
