"""A kept library is loaded only as it was written, by its owner; if not, it is made again."""

import os
import shutil
import subprocess
import sys

import pytest

from lowtide.core.bfloat16_units import compiled_library
from tests.core.bfloat16_units.small_library import (
    ask,
    builds,
    compile_strange,
    compiler,
    kept,
)
from tests.support.extended import all_extended_but

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="it is for Linux"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler"),
]


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def counted(tmp_path):
    return compiler(tmp_path, 'exec $GXX "$@"')


def sealed(path, content):
    return content + compiled_library._digest(path.name, content)


def test_library_compiled_once(tmp_path, cache, counted):
    for _ in range(2):
        assert ask(cache, CXX=counted) == "42"
    kept(cache)
    assert builds(tmp_path) == 1


def flipped(whole):
    return whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:]


DAMAGES = {
    "half": lambda whole: whole[: len(whole) // 2],
    "empty": lambda whole: b"",
    "a byte short": lambda whole: whole[:-1],
    "a byte long": lambda whole: whole + b"\0",
    "without its digest": lambda whole: whole[:-32],
    "its digest alone": lambda whole: whole[-32:],
    "zeros": lambda whole: bytes(len(whole)),
    "one bit": flipped,
    "kept under another name": lambda whole: whole[:-32] + compiled_library._digest("other", whole[:-32]),
}


@pytest.mark.extended
def test_library_damaged_rebuilt(tmp_path, cache, counted):
    """The processes that map half a library are killed."""
    assert ask(cache, CXX=counted) == "42"
    path = kept(cache)
    whole = path.read_bytes()
    for number, (name, damage) in enumerate(DAMAGES.items()):
        path.write_bytes(damage(whole))
        assert ask(cache, CXX=counted) == "42", name
        assert kept(cache).read_bytes() == whole, name
        assert ask(cache, CXX=counted) == "42", name
        assert builds(tmp_path) == 2 + number, name


def test_library_unloadable_rebuilt(tmp_path, cache, counted):
    assert ask(cache, CXX=counted) == "42"
    path = kept(cache)
    whole = path.read_bytes()
    other = tmp_path / "other.so"
    empty = ["g++", "-shared", "-fPIC", "-x", "c++", "/dev/null", "-o", other]  # without the function
    subprocess.run(empty, check=True)
    for content in (b"", b"not a library", other.read_bytes()):
        path.write_bytes(sealed(path, content))
        assert ask(cache, CXX=counted) == "42"
        assert kept(cache).read_bytes() == whole
    assert builds(tmp_path) == 4


@pytest.mark.parametrize(
    "how",
    all_extended_but(
        ["mode 0640", "link", "pipe"],
        ["mode 0666", "mode 0640", "mode 0700", "hard link", "link", "pipe", "owner"],
    ),
)
def test_library_writable_by_others_not_loaded(tmp_path, cache, how):
    assert ask(cache) == "42"
    path = kept(cache)
    other = tmp_path / "other"
    other.write_bytes(sealed(path, compile_strange(tmp_path)))
    other.chmod(0o600)
    path.unlink()
    if how == "link":
        path.symlink_to(other)
    elif how == "hard link":
        os.link(other, path)
    elif how == "pipe":
        os.mkfifo(path, 0o600)
    else:
        shutil.copy2(other, path)
        if how != "owner":
            path.chmod(int(how.split()[1], 8))
        elif os.geteuid() == 0:
            os.chown(path, 12345, 12345)
        else:
            pytest.skip("only root can give a file away")
    assert ask(cache) == "42"
    assert not (tmp_path / "proof").exists()
    kept(cache)


def test_library_sealed_file_loaded(tmp_path, cache):
    assert ask(cache) == "42"
    path = kept(cache)
    path.write_bytes(sealed(path, compile_strange(tmp_path)))
    assert ask(cache) == "13"
    assert (tmp_path / "proof").exists()
