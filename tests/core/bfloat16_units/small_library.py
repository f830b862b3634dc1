"""A process without torch that loads a small library by compiled_library.py and prints what its
function returns, 42; compilers for it that do what a script says; a library that it must not
load."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import lowtide

PROGRAM = """
import sys, types
# Without what their __init__ imports.
for name in ("lowtide", "lowtide.ops", "lowtide.ops.linear_cross_entropy"):
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = [sys.argv[1] + "/" + name.replace(".", "/")]
from lowtide.core.bfloat16_units import compiled_library

TEXT = b'extern "C" int answer() { return 42; }'
SOURCE = compiled_library.Source("answer", TEXT, ("-fPIC",), ("-shared",), ("answer",), "")
try:
    compiled_library.TIMEOUT = float(sys.argv[2])
    print(compiled_library.load_compiled(SOURCE).answer())
except compiled_library.NotLoadedError as error:
    print(error)
"""
STRANGE = """
#include <cstdio>
__attribute__((constructor)) static void run() { if (FILE* file = fopen("PROOF", "w")) fclose(file); }
extern "C" int answer() { return 13; }
"""
ROOT = str(Path(lowtide.__file__).parents[1])


def start(cache, *, timeout=60.0, before=(), **environment):
    environment = {**os.environ, "CXX": "g++", "TORCHINDUCTOR_CACHE_DIR": str(cache), **environment}
    command = [*before, sys.executable, "-c", PROGRAM, ROOT, str(timeout)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, **pipes, env=environment, text=True)


def ask(cache, **options):
    process = start(cache, **options)
    said = process.communicate()[0].strip()
    assert process.returncode == 0, said
    return said


def kept(cache):
    """The one file that is in the cache, and nothing else."""
    (path,) = (cache / "lowtide").iterdir()
    status = path.stat()
    assert (status.st_mode, status.st_nlink) == (stat.S_IFREG | 0o600, 1)
    assert path.read_bytes()[:4] == b"\x7fELF"
    return path


def compiler(tmp_path, script):
    """A $CXX that runs a script with the name of g++ as $GXX, and counts what it compiles."""
    path = tmp_path / "compiler"
    count = f'case "$*" in *-c*) echo >> {tmp_path}/builds;; esac'
    path.write_text(f"#!/bin/sh\nGXX={shutil.which('g++')}\n{count}\n{script}\n")
    path.chmod(0o755)
    return str(path)


def builds(tmp_path):
    path = tmp_path / "builds"
    return len(path.read_text().splitlines()) if path.exists() else 0


def compile_strange(tmp_path):
    """The bytes of another library, which leaves a file when it is loaded."""
    (tmp_path / "strange.cpp").write_text(STRANGE.replace("PROOF", str(tmp_path / "proof")))
    made = tmp_path / "strange.so"
    subprocess.run(["g++", "-shared", "-fPIC", "-o", made, tmp_path / "strange.cpp"], check=True)
    return made.read_bytes()
