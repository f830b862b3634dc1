import os
import pickle
import subprocess
import sys

import pytest
import torch
import typer
from torch.cuda import _memory_viz
from typer.testing import CliRunner

from lowtide.cli import profile
from lowtide.profile.record import Record
from lowtide.profile.timeline import timeline

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
    app = typer.Typer()
    app.command(context_settings=profile.SETTINGS)(profile.profile)
    return CliRunner().invoke(app, ["--device", device, *map(str, arguments)])


def read(out):
    assert (out / "memory.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with (out / "memory.pickle").open("rb") as file:
        snapshot = pickle.load(file)
    assert "Active Memory Timeline" in _memory_viz.trace_plot(snapshot)
    return timeline(snapshot)


def test_a_script_runs_as_it_would_by_itself(script, tmp_path):
    done = lowtide("--out", tmp_path / "out", script, "a", "--out", "b", 3)
    assert done.returncode == 3, done.stderr
    assert "arguments ['a', '--out', 'b', '3'] __main__" in done.stdout
    assert "peak: 4.00 MiB" in done.stdout
    line = read(tmp_path / "out")
    assert line.peak == 4 * 2**20
    assert str(tmp_path / "out" / "memory.pickle") in done.stdout


def test_what_a_failing_script_has_allocated_is_kept(script, tmp_path):
    arguments = sys.argv, sys.path
    done = invoke("--out", tmp_path / "out", script, "--fail")
    assert done.exit_code == 1
    assert "RuntimeError: out of luck" in done.output
    assert read(tmp_path / "out").peak == 4 * 2**20
    assert (sys.argv, sys.path) == arguments


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
    """Of the caching allocator, which knows what was held before, and the line of Python of each block."""
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
def test_a_script_on_cuda(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("import torch\nkept = torch.ones(2**20, device='cuda')\n")
    done = invoke("--out", tmp_path / "out", path, device="cuda")
    assert done.exit_code == 0, done.output
    assert read(tmp_path / "out").peak >= 4 * 2**20


@pytest.mark.parametrize("idle", [True, False])
def test_of_several_devices_the_one_with_the_highest_peak(tmp_path, monkeypatch, idle):
    sizes = [0 if idle else 2**20, 3 * 2**20]
    event = {"action": "alloc", "time_us": 0, "addr": 1, "stream": 0, "frames": []}
    traces = [[event | {"size": size}] if size else [] for size in sizes]
    block = {"state": "active_allocated"}
    segments = [{"device": at, "blocks": [block | {"requested_size": size}]} for at, size in enumerate(sizes)]
    record = Record({"device_traces": traces, "segments": segments})
    monkeypatch.setattr(profile, "run_steps", lambda *_: record)
    monkeypatch.setattr(profile, "choose_device", lambda _: "cuda")
    titles = []
    monkeypatch.setattr(profile, "draw", lambda lines, title, path: titles.append((title, *lines.values())))
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
def test_bad_input_is_one_clear_line(arguments, message, tmp_path):
    done = invoke("--out", tmp_path, *arguments)
    assert done.exit_code == 1
    (line,) = done.output.splitlines()
    assert line.startswith("lowtide profile: ")
    assert message in line


def test_a_script_without_allocations_says_so(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("print('nothing')")
    done = invoke("--out", tmp_path, path)
    assert done.exit_code == 1
    assert "nothing was allocated through torch" in done.output
