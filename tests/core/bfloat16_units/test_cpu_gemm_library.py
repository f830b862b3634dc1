"""Whether a CPU's own products can be had, in own processes; what is said where they cannot."""

import os
import shutil

import pytest

from lowtide.core.bfloat16_units import gemm
from tests.core.bfloat16_units.small_library import compile_strange
from tests.support.extended import all_extended_but
from tests.support.ranks import start_program

needs_products = pytest.mark.skipif(not gemm.available(), reason="no units for bfloat16, or no compiler")

ASK = "from lowtide.core.bfloat16_units import gemm; print(gemm.available())"
LOSS = """
import threading, torch, lowtide
generator = torch.Generator().manual_seed(0)
x, w = torch.randn(8, 64, generator=generator), torch.randn(2**14, 64, generator=generator)
target, errors = torch.arange(8), []
expected = torch.nn.functional.cross_entropy(x.bfloat16().double() @ w.bfloat16().double().T, target)
def call():
    loss = lowtide.linear_cross_entropy(x.bfloat16(), w.bfloat16(), target)
    errors.append(abs(loss.item() - expected.item()) / expected.item())
threads = [threading.Thread(target=call) for _ in range(4)]
for each in threads: each.start()
for each in threads: each.join()
call()
print(len(errors), max(errors) < 1e-5)
"""
DOCTOR = """
from lowtide.tools.doctor.linear_cross_entropy import AskedLossCall
print(AskedLossCall(8, 64, 2**14).describe()["why"])
"""
FORK = """
import os, threading, time
from lowtide.core.bfloat16_units import gemm
threading.Thread(target=gemm.available).start()
while not os.path.exists(os.environ["STARTED"]): time.sleep(0.01)
if os.fork():
    print(gemm.available(), os.wait()[1], flush=True)
else:
    found = gemm.available()
    os._exit(0 if found else 1)
"""


@pytest.fixture
def start(tmp_path_factory):
    """Start a program whose libraries are kept in a folder."""
    outputs = tmp_path_factory.mktemp("outputs")

    def start(folder, program: str = ASK, **environment: str):
        return start_program(
            outputs, program, {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder), **environment}
        )

    return start


@pytest.fixture
def ask(start):
    """Run such a program, and return what it says."""

    def ask(*arguments, **environment: str) -> tuple[str, str]:
        status, out, err = start(*arguments, **environment)()
        assert status == 0, err
        return out, err

    return ask


def assert_one_warning(err: str, expected: str) -> None:
    assert err.count("Warning") == 1, err
    assert "UserWarning: the CPU's products of bfloat16 operands are computed in float32, which is" in err
    assert expected in err


def script(path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@needs_products
@pytest.mark.parametrize("how", all_extended_but(["makes another thing"], ["fails", "makes another thing"]))
def test_compiler_fails(ask, tmp_path, how):
    made = "exit 1" if how == "fails" else "echo no > object.o; echo no > linked.so"
    compiler = script(tmp_path / "c++", f'case "$*" in *--version*) ;; *) {made};; esac')
    out, err = ask(tmp_path / "cache", CXX=compiler)
    assert out == "False\n"
    said = "failed: it says nothing" if how == "fails" else "made no library: "
    assert_one_warning(err, f"{compiler} {said}")


def test_compiler_missing(ask, tmp_path):
    assert ask(tmp_path / "cache", CXX=str(tmp_path / "c++")) == ("False\n", "")


@pytest.mark.extended
@needs_products
def test_compiler_with_arguments(ask, tmp_path):
    assert ask(tmp_path, CXX="env g++ -m64") == ("True\n", "")


@pytest.mark.extended
@needs_products
def test_build_by_two_processes(start, tmp_path):
    processes = [start(tmp_path) for _ in range(2)]
    for finish in processes:
        assert finish() == (0, "True\n", "")
    assert [path.suffix for path in (tmp_path / "lowtide").iterdir()] == [".so"]  # nothing else is left


@pytest.mark.extended
@needs_products
def test_cache_behind_link_refused(ask, tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "lowtide").symlink_to(tmp_path / "elsewhere")
    out, err = ask(tmp_path)
    assert out == "False\n"
    assert_one_warning(err, f"{tmp_path}/lowtide must be a directory, which it is not; correct that, or set")


@pytest.mark.extended
@needs_products
def test_cache_writable_by_others_warns_once(ask, tmp_path):
    """In all threads; and the doctor says the same."""
    (tmp_path / "lowtide").mkdir()
    (tmp_path / "lowtide").chmod(0o777)
    reason = f"{tmp_path}/lowtide is open to others: its mode 0777 must be 0700"
    out, err = ask(tmp_path, LOSS)
    assert out == "5 True\n"
    assert_one_warning(err, f"{reason}; correct that, or set TORCHINDUCTOR_CACHE_DIR to")
    out, _ = ask(tmp_path, DOCTOR)
    assert (
        f"not cpu_exponentials: they could not be loaded: {tmp_path}/lowtide cannot be used: {reason}" in out
    )


@pytest.mark.extended
@needs_products
def test_library_damaged_or_writable_by_others(ask, tmp_path):
    """Half a library kills the process that loads it."""
    assert ask(tmp_path) == ("True\n", "")
    (path,) = (tmp_path / "lowtide").iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert ask(tmp_path) == ("True\n", "")
    assert path.read_bytes() == whole
    path.chmod(0o666)
    path.parent.chmod(0o755)
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
    out, err = ask(tmp_path)
    assert out == "False\n"
    assert_one_warning(err, f"{path.parent} is open to others: its mode 0755 must be 0700; correct that")


@pytest.mark.extended
@needs_products
def test_cache_exchanged_during_build(ask, tmp_path):
    """In a directory that others may write to, another user exchanges the place after the compiler.
    The compiler does it here, at the right moment."""
    compile_strange(tmp_path)
    place = tmp_path / "open"
    place.mkdir()
    place.chmod(0o777)
    there = place / "lowtide"
    plant = f"for each in {there}/*/*.so; do cp {tmp_path}/strange.so $each; done"
    swap = f"mv {there} {place}/taken; cp -r {place}/taken {there}; {plant}"
    swaps = f'{shutil.which("g++")} "$@" || exit; case "$*" in *-shared*) {swap};; esac'
    out, err = ask(place, CXX=script(tmp_path / "c++", swaps))
    assert not (tmp_path / "proof").exists()
    assert out == "False\n"
    assert_one_warning(err, f"others can change {place}: its mode 0777")


@pytest.mark.extended
@needs_products
def test_build_during_fork(ask, tmp_path):
    """The child does not wait for a thread that it does not have."""
    slow = f'case "$*" in *--version*) touch {tmp_path}/started; sleep 1;; esac; exec g++ "$@"'
    compiler = script(tmp_path / "c++", slow)
    out, _ = ask(tmp_path / "cache", FORK, CXX=compiler, STARTED=str(tmp_path / "started"))
    assert out == "True 0\n"
