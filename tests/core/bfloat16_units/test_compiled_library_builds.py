"""A library is compiled once, privately, and kept whole or not at all, whatever happens."""

import ctypes
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from lowtide.core.bfloat16_units import compiled_library
from tests.core.bfloat16_units.small_library import (
    ask,
    builds,
    compile_strange,
    compiler,
    kept,
    start,
)

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="it is for Linux"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler"),
]


SOURCE = compiled_library.Source(
    "answer", b'extern "C" int answer() { return 42; }', ("-fPIC",), ("-shared",), ("answer",), ""
)


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def counted(tmp_path):
    return compiler(tmp_path, 'exec $GXX "$@"')


def test_build_by_many_processes(cache):
    processes = [start(cache) for _ in range(8)]
    assert [process.communicate()[0] for process in processes] == ["42\n"] * 8
    kept(cache)


@pytest.mark.parametrize("mask", ["0", "002", "077"])
def test_build_any_umask(cache, mask):
    assert ask(cache, before=("sh", "-c", f'umask {mask}; exec "$@"', "sh")) == "42"
    assert stat.S_IMODE((cache / "lowtide").stat().st_mode) == 0o700
    kept(cache)


def test_build_without_standard_streams(cache):
    """Descriptors 0 and 2 are free, and the compiler's are made of them."""
    assert ask(cache, before=("sh", "-c", 'exec "$@" <&- 2>&-', "sh")) == "42"


@pytest.mark.parametrize("when", ["-c", "-shared"])
def test_build_killed(tmp_path, cache, when):
    killer = compiler(tmp_path, f'case "$*" in *{when}*) kill -9 $PPID;; *) exec $GXX "$@";; esac')
    process = start(cache, CXX=killer)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    (left,) = (cache / "lowtide").iterdir()
    assert left.name.startswith(compiled_library.BUILD)
    assert ask(cache) == "42"
    assert left.exists()  # it may be that of a process that still runs
    long_ago = time.time() - 2 * compiled_library.OLD
    os.utime(left, (long_ago, long_ago))
    next(path for path in (cache / "lowtide").iterdir() if path.suffix == ".so").unlink()
    assert ask(cache) == "42"
    kept(cache)


@pytest.mark.parametrize(
    ("when", "timeout"), [("--version", 1.0), pytest.param("-shared", 5.0, marks=pytest.mark.extended)]
)
def test_compiler_hangs(tmp_path, cache, when, timeout):
    slow = f"sleep 100 & echo $! > {tmp_path}/pid; wait"
    hangs = compiler(tmp_path, f'case "$*" in *{when}*) {slow};; *) exec $GXX "$@";; esac')
    said = ask(cache, timeout=timeout, CXX=hangs)
    assert said.startswith(f"{hangs} did not end within {timeout} s; correct that, or set CXX")
    deadline = time.monotonic() + 10
    pid = (tmp_path / "pid").read_text().strip()
    while running(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not running(pid)
    assert not (cache / "lowtide").exists() or list((cache / "lowtide").iterdir()) == []


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo one >&2; echo 'an error' >&2; exit 1", "failed: an error; correct that, or set CXX"),
        ("exit 3", "failed: it says nothing; correct that, or set CXX"),
        (": > linked.so", "made no library: "),
        ("echo no > linked.so", "made no library: "),
        ("exit 0", "cannot be used: No such file or directory"),
    ],
)
def test_compiler_fails(tmp_path, cache, script, expected):
    fails = compiler(tmp_path, f'case "$*" in *--version*) ;; *) {script};; esac')
    assert expected in ask(cache, CXX=fails)
    assert list((cache / "lowtide").iterdir()) == []


def test_compiler_not_runnable(tmp_path, cache):
    (tmp_path / "compiler").write_bytes(b"\x7fELF")
    (tmp_path / "compiler").chmod(0o755)
    assert "cannot be run: [Errno 8]" in ask(cache, CXX=str(tmp_path / "compiler"))
    assert ask(cache, CXX="nowhere/c++ -m64") == "there is no C++ compiler (nowhere/c++ -m64)"
    assert ask(cache, CXX="'").startswith("""CXX="'" cannot be read: No closing quotation; correct that""")


def test_compiler_by_relative_path(tmp_path, counted, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert ask("relative", CXX="./compiler -m64") == "42"
    assert ask("relative", CXX="compiler", PATH=f".:{os.environ['PATH']}") == "42"
    assert len(list((tmp_path / "relative" / "lowtide").iterdir())) == 2


def test_compiler_in_private_directory(tmp_path, cache):
    """Its own temporary files as well: $TMPDIR may be open to others."""
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    look = f'case "$*" in *--version*) ;; *) (cd "$TMPDIR" && pwd -P; stat -c %a .) >> {tmp_path}/seen;; esac'
    looks = compiler(tmp_path, f'{look}; exec $GXX -wrapper {tmp_path}/wrapper "$@"')
    (tmp_path / "wrapper").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/commands\nexec "$@"\n')
    (tmp_path / "wrapper").chmod(0o755)
    assert ask(cache, CXX=looks, TMPDIR=str(tmp_path / "open")) == "42"
    lines = (tmp_path / "seen").read_text().splitlines()
    assert len(lines) == 4
    assert all(line.startswith(f"{cache}/lowtide/{compiled_library.BUILD}") for line in lines[::2])
    assert lines[1::2] == ["700", "700"]
    commands = (tmp_path / "commands").read_text()
    assert "cc1plus" in commands
    assert str(tmp_path / "open") not in commands
    assert "/tmp/cc" not in commands


def test_cache_exchanged_during_build(tmp_path, cache):
    """What is at the old path after the compiler has run is neither loaded nor written to."""
    compile_strange(tmp_path)
    there, gone = cache / "lowtide", cache / "gone"
    plant = f"for each in {there}/*/; do cp {tmp_path}/strange.so $each/linked.so; done"
    swap = f"mv {there} {gone}; cp -r {gone} {there}; {plant}"
    swaps = compiler(tmp_path, f'$GXX "$@" || exit; case "$*" in *-shared*) {swap};; esac')
    assert ask(cache, CXX=swaps) == "42"
    assert not (tmp_path / "proof").exists()
    assert [path.suffix for path in gone.iterdir()] == [".so"]
    assert [path.suffix for path in there.iterdir()] == [""]


def test_cache_writable_by_others_refused(tmp_path, counted):
    place = tmp_path / "open" / "cache"
    place.mkdir(parents=True)
    (tmp_path / "open").chmod(0o777)
    said = ask(place, CXX=counted)
    assert f"cannot be used: others can change {tmp_path}/open: its mode 0777" in said
    assert "set TORCHINDUCTOR_CACHE_DIR to a directory of your home" in said
    said = ask("", CXX=counted, TMPDIR=str(tmp_path / "open"))
    assert said.startswith(f"{tmp_path}/open/lowtide_{os.geteuid()} cannot be used: others can change")
    assert builds(tmp_path) == 0
    assert [path.name for path in (tmp_path / "open").iterdir()] == ["cache"]


def test_cache_place_ignores_torch_default(tmp_path, monkeypatch):
    """torch.compile sets the variable; the place must not change with it."""
    monkeypatch.setattr(compiled_library.tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    default = compiled_library.cache_place()
    assert default == (str(tmp_path), f"lowtide_{os.geteuid()}")
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    made = cache_dir()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == made
    assert compiled_library.cache_place() == default
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "named"))
    assert compiled_library.cache_place() == (str(tmp_path / "named"), "lowtide")


def test_disk_full(cache):
    """A limit on the size of files stands for a full disk, for the compiler and then us."""
    assert "failed: " in ask(cache, before=("sh", "-c", 'ulimit -f 1; exec "$@"', "sh"))
    assert list((cache / "lowtide").iterdir()) == []
    assert ask(cache) == "42"
    path = kept(cache)
    size = path.stat().st_size
    path.write_bytes(b"")
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({size - 1}, {size - 1}))"
    program = f"import os, sys; {limit}; os.execvp(sys.argv[1], sys.argv[1:])"
    said = ask(cache, before=(sys.executable, "-c", program))
    assert said.startswith(f"{cache}/lowtide cannot be used: File too large; correct that, or set TORCH")
    assert list((cache / "lowtide").iterdir()) == [path]
    assert ask(cache) == "42"
    kept(cache)


def mounted(cache, options):
    """A command before another that gives it a file system of its own there."""
    script = f'mount -t tmpfs -o {options} tmpfs "{cache}" && exec "$@"'
    return ("unshare", "--mount", "sh", "-c", script, "sh")


def may_mount():
    if os.geteuid() or shutil.which("unshare") is None:
        return False
    tried = subprocess.run((*mounted("/mnt", "size=4k"), "true"), capture_output=True)
    return tried.returncode == 0


@pytest.mark.skipif(not may_mount(), reason="only root may mount, and not everywhere")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("mode=700,noexec", "cache/lowtide cannot be used: its file system is mounted noexec"),
        ("mode=700,ro", "Read-only file system"),
        ("mode=700,size=8k", "failed: "),
        ("mode=700", "42"),
        ("mode=777", "others can change"),
    ],
)
def test_file_system_options(cache, options, expected):
    cache.mkdir()
    assert expected in ask(cache, before=mounted(cache, options))


def test_library_with_reused_descriptor_path(tmp_path, cache, monkeypatch):
    """To the loader, what has the path of a library is that library, even if the path is a
    descriptor's number, which another file has got since."""
    compile_strange(tmp_path)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    with open(tmp_path / "strange.so", "rb") as file:
        descriptors = [os.dup(file.fileno()) for _ in range(20)]
    for each in descriptors:
        assert ctypes.CDLL(f"/proc/self/fd/{each}").answer() == 13
        os.close(each)
    for text in (SOURCE.text, SOURCE.text.replace(b"42", b"43")):
        library = compiled_library.load_compiled(replace(SOURCE, text=text))
        assert library.answer() == (42 if text == SOURCE.text else 43)
        assert ".so" in os.readlink(library._name)  # the number stays taken


def test_library_synced_before_rename(cache, monkeypatch):
    """What a machine that goes down leaves under the name is whole."""
    calls = []
    fsync, rename = os.fsync, os.replace

    def synced(descriptor):
        calls.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def renamed(*names, **folders):
        calls.append("renamed")
        rename(*names, **folders)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    assert compiled_library.load_compiled(SOURCE).answer() == 42
    folder = (cache / "lowtide").stat().st_ino
    assert calls[-3:] == [kept(cache).stat().st_ino, "renamed", folder]
