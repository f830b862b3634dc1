"""Compile a C++ file once per user, and load the library from a private directory.

Only this user can change the directory. A library is stored with its digest at the end. One file
descriptor serves to check its owner, mode, link count and digest, and then to load it. If a check
fails, the library is compiled again.

A new library is written in a build directory of its own, synced, loaded and then renamed. So any
number of processes may build at once, be killed or find the disk full: each process finds a whole
library or none. There are no locks. Linux only.
"""

import ctypes
import hashlib
import os
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lowtide.core.bfloat16_units.private_directory import open_private_directory

TIMEOUT = 120  # seconds per compiler command
BUILD = "build_"
OLD = 3600  # seconds after which a build directory counts as abandoned
PRIVATE_FILE = stat.S_IFREG | 0o600
OTHER_PLACE = (
    "correct that, or set TORCHINDUCTOR_CACHE_DIR to a directory of your home that only you can change"
)
OTHER_COMPILER = "correct that, or set CXX to another C++ compiler, such as g++ 10 or later"


class NotLoadedError(Exception):
    """Report that the library cannot be loaded; the message gives the reason and a remedy."""


class NoCompilerError(NotLoadedError):
    """Report that there is no compiler."""


@dataclass(frozen=True)
class Source:
    """Describe a C++ file and how to compile it."""

    name: str  # file name, and name of its library
    text: bytes
    compile_flags: tuple[str, ...]
    link_flags: tuple[str, ...]
    functions: tuple[str, ...]  # names of the functions that the library must have
    depends_on: str  # what the library depends on, besides the source, the flags and the compiler


def load_compiled(source: Source) -> ctypes.CDLL:
    """Return the library of ``source``; compile it if there is none. Raises NotLoadedError."""
    compiler = find_compiler()
    facts = (source, compiler, run([*compiler, "--version"]))
    file = f"{source.name}_{hashlib.sha256(repr(facts).encode()).hexdigest()[:32]}.so"
    parent, name = cache_place()
    try:
        folder = open_private_directory(parent, name)
        try:
            with suppress(OSError):  # the library is missing or damaged, or another user owns it
                return _load(folder, file, file, source.functions)
            return _build(source, compiler, folder, file)
        finally:
            os.close(folder)
    except OSError as problem:
        reason = problem.strerror or str(problem)
        raise NotLoadedError(f"{parent}/{name} cannot be used: {reason}; {OTHER_PLACE}") from None


def cache_place() -> tuple[str, str]:
    """Return the directory for libraries, as its parent and its name.

    If the user chose a directory for torch.compile's files, the parent is that directory. Otherwise
    it is the system's temporary directory.
    """
    named = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    try:
        own = tempfile.gettempdir()
        # torch.compile sets the variable too, to a directory that it makes. Do not use that one:
        # with some umasks, others may write to it.
        if named and not named.startswith(os.path.join(own, "torchinductor_")):
            return os.path.abspath(named), "lowtide"
    except FileNotFoundError as problem:
        raise NotLoadedError(f"{problem.strerror}; {OTHER_PLACE}") from None
    return own, f"lowtide_{os.geteuid()}"


def _load(folder: int, file: str, name: str, functions: tuple[str, ...]) -> ctypes.CDLL:
    """Load the library that was stored as ``name``. Raise OSError if it has been changed."""
    found = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    try:
        status = os.fstat(found)
        if (status.st_mode, status.st_uid, status.st_nlink) != (PRIVATE_FILE, os.geteuid(), 1):
            raise PermissionError(f"{file} is not a file of this user's alone")
        with open(found, "rb", closefd=False) as reader:
            content = reader.read()
        size = max(0, len(content) - hashlib.sha256().digest_size)
        if _digest(name, content[:size]) != content[size:]:
            raise OSError(f"{file} is damaged")
        # For a path that it knows, the loader returns the library that it has loaded before. So no
        # two libraries may have the same path. No other code writes "/./" here. The descriptor of a
        # loaded library stays open, so no other file gets its number.
        library = ctypes.CDLL(f"/proc/self/fd/./{found}")
    except BaseException:
        os.close(found)
        raise
    for function in functions:
        if not hasattr(library, function):
            raise OSError(f"{file} has no function {function}")
    return library


def _build(source: Source, compiler: list[str], folder: int, name: str) -> ctypes.CDLL:
    """Compile, load and store the library, by descriptors, so that no path can be redirected."""
    if os.fstatvfs(folder).f_flag & os.ST_NOEXEC:
        raise PermissionError("its file system is mounted noexec")
    _remove_old_builds(folder)
    path = tempfile.mkdtemp(prefix=BUILD, dir=f"/proc/self/fd/{folder}")
    try:
        own = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            _write(own, f"{source.name}.cpp", source.text)
            run([*compiler, *source.compile_flags, "-c", f"{source.name}.cpp", "-o", "object.o"], cwd=path)
            run([*compiler, *source.link_flags, "object.o", "-o", "linked.so"], cwd=path)
            content = Path(path, "linked.so").read_bytes()
            _write(own, name, content + _digest(name, content))
            try:
                library = _load(own, name, name, source.functions)
            except OSError as problem:
                raise NotLoadedError(f"{compiler[0]} made no library: {problem}; {OTHER_COMPILER}") from None
            os.replace(name, name, src_dir_fd=own, dst_dir_fd=folder)
            with suppress(OSError):  # if it fails, a crash may lose the name, but not the content
                os.fsync(folder)
            return library
        finally:
            os.close(own)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _digest(name: str, content: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\0" + content).digest()


def _write(folder: int, name: str, content: bytes) -> None:
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
    with open(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(descriptor)


def _remove_old_builds(folder: int) -> None:
    for name in os.listdir(folder):
        with suppress(OSError):  # another process has removed it
            made = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime
            if name.startswith(BUILD) and made < time.time() - OLD:
                shutil.rmtree(f"/proc/self/fd/{folder}/{name}", ignore_errors=True)


def run(command: list[str], *, cwd: str | None = None) -> bytes:
    """Run a compiler command and return its output. Raises NotLoadedError if it fails or hangs."""
    environment = {**os.environ, "LC_ALL": "C"}
    if cwd is not None:
        environment["TMPDIR"] = "."  # the compiler's temporary files stay private as well
    try:
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=cwd,
            env=environment,
            start_new_session=True,
        ) as process:
            try:
                out, err = process.communicate(timeout=TIMEOUT)
            except BaseException:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # and the processes that it started
                raise
    except subprocess.TimeoutExpired:
        raise NotLoadedError(f"{command[0]} did not end within {TIMEOUT} s; {OTHER_COMPILER}") from None
    except OSError as problem:
        raise NotLoadedError(f"{command[0]} cannot be run: {problem}; {OTHER_COMPILER}") from None
    if process.returncode:
        lines = err.decode(errors="replace").strip().splitlines()
        said = next((line for line in lines if "rror" in line), lines[0] if lines else "it says nothing")
        raise NotLoadedError(f"{command[0]} failed: {said}; {OTHER_COMPILER}")
    return out


def find_compiler() -> list[str]:
    """Return the compiler's command: $CXX with its arguments or wrapper, else c++ or g++.

    Do not try other compilers: their OpenMP would not be the one that torch has loaded.
    """
    named = os.environ.get("CXX", "")
    try:
        own = shlex.split(named)
    except ValueError as problem:
        raise NotLoadedError(f"CXX={named!r} cannot be read: {problem}; {OTHER_COMPILER}") from None
    for command in [own] if own else [["c++"], ["g++"]]:
        if (found := shutil.which(command[0])) is not None:
            return [os.path.abspath(found), *command[1:]]
    raise NoCompilerError(f"there is no C++ compiler ({shlex.join(own) or 'c++, g++'})")
