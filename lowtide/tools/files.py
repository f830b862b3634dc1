"""Write files that are either complete or absent: a process may be killed at any instruction."""

import contextlib
import csv
import errno
import io
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import torch

from lowtide.tools.errors import UserError

BLOCK = 4096  # In bytes: a full disk still allows an empty file.


class DamagedFile(Exception):
    pass


@contextlib.contextmanager
def whole_file(path: Path, mode: str = "wb", **options: Any) -> Iterator[IO[Any]]:
    """Yield a file that replaces `path` when the block ends; if the block fails, `path` stays.

    A device or a pipe is written to directly. An OSError names the path.
    """
    path = Path(os.path.realpath(path))  # A link stays, and leads to the new file.
    with naming(path):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if path.exists() and not path.is_file():
            with open(path, mode, **options) as file:
                yield file
            return
        _make_directory(path.parent)
        # In the same directory, because a rename is atomic only within one file system.
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            with open(unfinished, mode, **options) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError as problem:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from problem


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give an OSError of this block that names no file the name `path`."""
    try:
        yield
    except OSError as problem:
        if problem.errno is None or problem.filename is not None:
            raise
        raise OSError(problem.errno, problem.strerror, str(path)) from problem


def check_writable(path: Path) -> None:
    """Raise the OSError that writing a file there would raise; leave and change nothing."""
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        with naming(path):
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return
    made = [each for each in path.parents if not each.exists()]  # The innermost first.
    try:
        with contextlib.suppress(_Tried), whole_file(path) as file:
            file.write(bytes(BLOCK))
            file.flush()
            raise _Tried
    finally:
        for directory in made:
            with contextlib.suppress(OSError):
                directory.rmdir()


class _Tried(Exception):
    """Signal that a file can be written, so that it is left unwritten."""


@contextlib.contextmanager
def growing_table(path: Path, columns: Sequence[str]) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield a function that writes a row of a CSV at once: an interrupted run keeps its rows."""
    with naming(path):
        _make_directory(path.parent)
        with open(path, "w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, columns, lineterminator="\n")
            table.writeheader()

            def write(row: dict[str, Any]) -> None:
                table.writerow(row)
                file.flush()

            yield write


def read_table(path: Path, columns: Sequence[str], kind: str) -> list[dict[str, str]]:
    """Return the rows of a CSV with at least these columns; `kind` names the file in errors."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            names = reader.fieldnames or ()
            rows = list(reader)
    except (csv.Error, UnicodeDecodeError) as problem:
        raise UserError(f"{path} is no CSV of {kind}: it is no text") from problem
    absent = [name for name in columns if name not in names]
    if absent:
        raise UserError(f"{path} has no column {absent[0]!r}: it is no CSV of {kind}")
    if not rows:
        raise UserError(f"{path} has no rows")
    if any(None in row.values() for row in rows):
        raise UserError(f"{path}: a row has too few cells, as if the file were cut off")
    return rows


def save(content: dict, path: Path) -> None:
    """Write a dictionary of tensors and numbers, in the format of `torch.save`, as a whole file.

    torch writes to memory. Where a write to a file fails or is interrupted, its zip writer raises
    an error of its own instead, or ends the process.
    """
    memory = io.BytesIO()
    torch.save(content, memory)
    with whole_file(path) as file:
        file.write(memory.getbuffer())


def load(path: Path) -> dict:
    """Return the dictionary that `save` wrote, on the CPU; the file executes no code."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError):
        raise
    except Exception as problem:  # A damaged file can fail anywhere in zip, pickle or torch.
        raise DamagedFile(f"{path} is damaged") from problem
    if not isinstance(content, dict):
        raise DamagedFile(f"{path} holds something else")
    return content
