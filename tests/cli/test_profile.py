import contextlib
import os
import pickle
import signal
import subprocess
import sys

import pytest
import torch
from torch.cuda import _memory_viz

from lowtide.cli import profile
from lowtide.tools.profile import run
from lowtide.tools.profile.record import Record
from lowtide.tools.profile.timeline import timeline
from tests.support.commands import invoke as in_this_process

SCRIPT = """
import sys
import torch
from beside import SIZE

print("arguments", sys.argv[1:], __name__)
kept = torch.ones(SIZE)
if "--fail" in sys.argv:
    raise RuntimeError("out of luck")
sys.exit(int(sys.argv[-1]))
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "beside.py").write_text("SIZE = 2**20\n")
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def lowtide(*arguments):
    command = [sys.executable, "-m", "lowtide", "profile", "--device", "cpu", *map(str, arguments)]
    patient = os.environ | {"OMP_WAIT_POLICY": "passive"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=patient)


def invoke(*arguments, device="cpu"):
    return in_this_process("profile", "--device", device, *arguments)


def read(out):
    assert (out / "memory.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with (out / "memory.pickle").open("rb") as file:
        snapshot = pickle.load(file)
    assert "Active Memory Timeline" in _memory_viz.trace_plot(snapshot)
    return timeline(snapshot)


@pytest.mark.extended
def test_script_runs_as_main(script, tmp_path):
    done = lowtide("--out", tmp_path / "out", script, "a", "--out", "b", 3)
    assert done.returncode == 3, done.stderr
    assert_ran_as_main(done.stdout, tmp_path)


def test_script_runs_as_main_in_this_process(script, tmp_path):
    done = invoke("--out", tmp_path / "out", script, "a", "--out", "b", 3)
    assert done.exit_code == 3, done.stderr
    assert_ran_as_main(done.stdout, tmp_path)


def assert_ran_as_main(printed, tmp_path):
    assert "arguments ['a', '--out', 'b', '3'] __main__" in printed
    assert "peak: 4.00 MiB" in printed
    line = read(tmp_path / "out")
    assert line.peak == 4 * 2**20
    assert str(tmp_path / "out" / "memory.pickle") in printed


def test_script_failing_keeps_record(script, tmp_path):
    arguments = sys.argv, sys.path
    done = invoke("--out", tmp_path / "out", script, "--fail")
    assert done.exit_code == 1
    assert "RuntimeError: out of luck" in done.output
    assert read(tmp_path / "out").peak == 4 * 2**20
    assert (sys.argv, sys.path) == arguments


def test_files_in_starting_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "else").mkdir()
    (tmp_path / "leaves.py").write_text("import os, torch\nos.chdir('else')\ntorch.ones(2**20)\n")
    done = invoke("--out", "deeper/made", "leaves.py")
    assert (done.exit_code, done.stderr) == (0, "")
    assert "picture: deeper/made/memory.png\n" in done.stdout
    assert read(tmp_path / "deeper" / "made").peak == 4 * 2**20
    assert not list((tmp_path / "else").iterdir())


ENDINGS = {
    "raise KeyboardInterrupt": (130, ""),
    "import os, signal; os.kill(os.getpid(), signal.SIGINT)": (130, ""),
    "import os, signal; os.kill(os.getpid(), signal.SIGTERM)": (143, ""),
    "raise SystemExit(7)": (7, ""),
    "raise SystemExit('sorry')": (1, "sorry\n"),
    "raise SystemExit(2.5)": (1, "2.5\n"),
    "raise SystemExit": (0, ""),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_script_ending_early_keeps_record(ending, tmp_path):
    path = tmp_path / "script.py"
    path.write_text(f"import torch\nkept = torch.ones(2**20)\n{ending}\n")
    handler = signal.getsignal(signal.SIGTERM)
    done = invoke("--out", tmp_path / "out", path)
    assert (done.exit_code, done.stderr) == ENDINGS[ending]
    assert ("interrupted; what follows was recorded until then\n" in done.stdout) == (done.exit_code == 130)
    assert read(tmp_path / "out").peak == 4 * 2**20
    assert signal.getsignal(signal.SIGTERM) == handler


def test_results_printed_before_picture(tmp_path, monkeypatch):
    """A second Ctrl-C ends the command there."""

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(profile, "draw", interrupt)
    path = tmp_path / "script.py"
    path.write_text("import torch\nkept = torch.ones(2**20)\nraise KeyboardInterrupt\n")
    done = invoke("--out", tmp_path / "out", path)
    assert done.exit_code == 130
    interrupted, peak, snapshot = done.stdout.splitlines()
    assert interrupted == "interrupted; what follows was recorded until then"
    assert peak == "peak: 4.00 MiB"
    assert snapshot == f"for pytorch.org/memory_viz: {tmp_path / 'out' / 'memory.pickle'}"


def test_steps_interrupted_keep_record(tmp_path, monkeypatch):
    calls = []

    @contextlib.contextmanager
    def training(*_):
        def step():
            calls.append(torch.ones(2**20))
            if len(calls) == 3:
                raise KeyboardInterrupt

        yield step, None, None

    monkeypatch.setattr(run, "training", training)
    done = invoke("--step", "demo-cpu", "--steps", 5, "--out", tmp_path)
    assert (done.exit_code, len(calls)) == (130, 3)
    assert read(tmp_path).peak == 2 * 4 * 2**20, "without the first, which warms up"


@pytest.mark.parametrize("content", ["def (\n", "import torch\nraise RuntimeError('out of luck')\n", "\0"])
def test_script_error_shown_as_by_python(content, tmp_path):
    path = tmp_path / "script.py"
    path.write_text(content)
    done = invoke("--out", tmp_path / "out", path)
    assert done.exit_code == 1
    assert "runpy" not in done.stderr
    assert "lowtide/tools/profile" not in done.stderr
    assert "Error" in done.stderr
    assert done.stderr.endswith("lowtide profile: nothing was allocated through torch\n")


def peaks_of_steps(tmp_path, device, length):
    """By loss."""
    peaks = {}
    for loss in ("eager", "lowtide"):
        arguments = ("--step", "demo-cpu", "--length", length, "--steps", 1)
        done = invoke(*arguments, "--loss", loss, "--out", tmp_path / loss, device=device)
        assert done.exit_code == 0, done.output
        assert ("beyond what was held before" in done.output) == (device == "cpu")
        peaks[loss] = read(tmp_path / loss).peak
    return peaks


def test_steps_of_a_model(tmp_path):
    peaks = peaks_of_steps(tmp_path, "cpu", 256)
    logits = 4 * 256 * 32_768
    assert peaks["lowtide"] < 2 * logits
    assert peaks["eager"] > 3 * logits


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_steps_on_cuda(tmp_path):
    """Of the caching allocator, which knows what was held before and each block's Python line."""
    peaks = peaks_of_steps(tmp_path, "cuda", 16_384)
    logits = 4 * 16_384 * 32_768  # twice the default workspace
    assert peaks["eager"] - peaks["lowtide"] > logits
    with (tmp_path / "eager" / "memory.pickle").open("rb") as file:
        snapshot = pickle.load(file)
    largest = max(
        (each for each in snapshot["device_traces"][0] if each["action"] == "alloc"),
        key=lambda each: each["size"],
    )
    assert largest["size"] == logits
    assert any(frame["filename"].endswith("estimate/model.py") for frame in largest["frames"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_script_on_cuda(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("import torch\nkept = torch.ones(2**20, device='cuda')\n")
    done = invoke("--out", tmp_path / "out", path, device="cuda")
    assert done.exit_code == 0, done.output
    assert read(tmp_path / "out").peak >= 4 * 2**20


@pytest.mark.parametrize("idle", [True, False])
def test_several_devices_highest_peak(tmp_path, monkeypatch, idle):
    sizes = [0 if idle else 2**20, 3 * 2**20]
    event = {"action": "alloc", "time_us": 0, "addr": 1, "stream": 0, "frames": []}
    traces = [[event | {"size": size}] if size else [] for size in sizes]
    block = {"state": "active_allocated"}
    segments = [{"device": at, "blocks": [block | {"requested_size": size}]} for at, size in enumerate(sizes)]
    record = Record({"device_traces": traces, "segments": segments})
    monkeypatch.setattr(profile, "run_steps", lambda *_: (record, 0))
    monkeypatch.setattr(profile, "choose_device", lambda _: "cuda")
    titles = []
    monkeypatch.setattr(profile, "draw", lambda label, line, title, path: titles.append((title, line)))
    done = invoke("--step", "demo-cpu", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    ((title, line),) = titles
    assert line.peak == 3 * 2**20
    peak, *_ = done.output.splitlines()
    assert title.endswith("tokens" if idle else "tokens, cuda:1")
    assert peak == "peak: 3.00 MiB" + ("" if idle else " on cuda:1, the most of 2 devices")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give either a script or --step MODEL"),
        (("--step", "demo-cpu", "script.py"), "give either a script or --step MODEL"),
        (("none.py",), "none.py: no such file"),
        (("--step", "none"), "none: no such file"),
        (("--step", "demo-cpu", "--dtype", "float16"), "give --dtype autocast or float32"),
    ],
)
def test_input_refused(arguments, message, tmp_path):
    done = invoke("--out", tmp_path, *arguments)
    assert done.exit_code == 1
    (line,) = done.output.splitlines()
    assert line.startswith("lowtide profile: ")
    assert message in line


def test_script_without_allocations(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("print('nothing')")
    done = invoke("--out", tmp_path, path)
    assert done.exit_code == 1
    assert "nothing was allocated through torch" in done.output
