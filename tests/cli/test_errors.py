"""What a user can put right is answered by a sentence and an exit status, never by a traceback."""

import errno
import os
import re
import resource
import signal
import subprocess
import sys
import time
import typing

import pytest
import torch

from lowtide.cli import doctor, make_app, profile
from lowtide.cli import train as train_command
from lowtide.cli.bench import attention, heads, host, loss, saved, steps, timeline
from lowtide.cli.shared import errors
from lowtide.cli.shared.parameters import output_directory, output_file, output_picture, size_in_bytes
from lowtide.core.errors import ArgumentError
from lowtide.tools.errors import UserError
from tests.support.commands import invoke, said

SIZES = {"vocab-size": 280, "width": 64, "depth": 1, "context": 16, "batch": 2, "device": "cpu"}
TRAIN = [str(part) for name, size in SIZES.items() for part in (f"--{name}", size)]


@pytest.fixture
def text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    (tmp_path / "text.txt").write_text(" ".join(f"w{k * 7919 % 613}" for k in range(6000)))


def start(*arguments, **options):
    command = [sys.executable, "-m", "lowtide", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, **(pipes | options))


def commands(app, words=()):
    """Each command's words and function."""
    for group in app.registered_groups:
        yield from commands(group.typer_instance, (*words, group.name))
    for command in app.registered_commands:
        yield (*words, command.name), command.callback


COMMANDS = dict(commands(make_app()))
OPTIONS = [
    (words, name, *typing.get_args(hint))
    for words, function in COMMANDS.items()
    for name, hint in typing.get_type_hints(function, include_extras=True).items()
    if name not in ("return", "context")
]


# Bytes


@pytest.mark.parametrize(
    ("words", "size"),
    [
        *(("1", 1), ("268435456", 2**28), ("1e9", 10**9), ("7B", 7)),
        *(("256MiB", 2**28), ("256mib", 2**28), ("1.5GiB", 3 * 2**29), ("64 KiB", 2**16), ("1TiB", 2**40)),
        *(("500MB", 500 * 10**6), ("1GB", 10**9), ("9223372036854775807", 2**63 - 1)),
    ],
)
def test_bytes_with_units(words, size):
    assert size_in_bytes(words) == size


@pytest.mark.parametrize(
    "words",
    [
        "",
        "0",
        "-1",
        "0.5",
        "0.0625",
        "inf",
        "nan",
        "x",
        "MiB",
        "1MiB2",
        "1 XB",
        "1.2.3",
        "0x10",
        "1e400",
        "9e6TiB",
    ],
)
@pytest.mark.parametrize(
    "command",
    [("estimate", "demo-cpu"), ("doctor", "linear-cross-entropy"), ("bench", "options")],
    ids=" ".join,
)
def test_workspace_malformed(command, words):
    done = invoke(*command, "--workspace", words)
    assert done.exit_code == 2
    assert f"Invalid value for '--workspace': {words!r} must be" in said(done)


def test_workspace_options_are_bytes():
    found = {words: option.parser for words, name, _, option in OPTIONS if name == "workspace"}
    commands = {("estimate",), ("doctor", "linear-cross-entropy"), ("bench", "options"), ("warmup",)}
    assert found.keys() == commands
    assert set(found.values()) == {size_in_bytes}


def test_switches_are_flags():
    """It takes no value: what follows is another argument."""
    switches = [(words, name) for words, name, kind, *_ in OPTIONS if kind is bool]
    assert len(switches) >= 12
    needs = {("estimate",): ["demo-cpu"], ("warmup",): ["--shape", "4,8,8"]}
    for words, name in switches:
        if words == ("profile",):  # where that is the script
            continue
        done = invoke(*words, *needs.get(words, ()), f"--{name.replace('_', '-')}", "true")
        assert (done.exit_code, re.search("unexpected extra argument.*true", said(done)) is not None) == (
            2,
            True,
        ), (words, name)


# Files that will be written

OUTPUTS = {
    ("estimate", "demo-cpu"): ("--out", "--csv"),
    ("profile", "--step", "demo-cpu"): ("--out",),
    ("train", "--data", "text.txt", *TRAIN): ("--out",),
    ("bench", "linear-cross-entropy"): ("--out", "--csv"),
    ("bench", "options"): ("--out",),
    ("bench", "heads"): ("--out", "--plot"),
    ("bench", "chunked-loss"): ("--out",),
    ("bench", "distillation"): ("--out",),
    ("bench", "attention"): ("--out", "--plot"),
    ("bench", "host"): ("--out",),
    ("bench", "steps"): ("--out",),
    ("bench", "draw", "rows.csv"): ("--out",),
    ("bench", "memory-timeline", "--smoke"): ("--csv", "--picture"),
}


@pytest.mark.parametrize("command", OUTPUTS, ids=lambda command: " ".join(command[:2]))
def test_output_checked_before_work(command, text, tmp_path, monkeypatch):
    def work(*_, **__):
        raise AssertionError("the work has started")

    for module, name in [
        *((command, "print_tables") for command in (loss, heads, attention, host, steps)),
        *((saved, "draw_figure"), (timeline, "measure"), (profile, "run_steps")),
        *((train_command, "train_one"), (sys.modules["lowtide.cli.estimate"], "estimated")),
    ]:
        monkeypatch.setattr(module, name, work)
    (tmp_path / "directory.png").mkdir()
    before = sorted(tmp_path.rglob("*"))
    for option in OUTPUTS[command]:
        for path in ("text.txt/x.png", "/proc/nowhere/x.png", "a" * 300 + ".png", ""):
            done = invoke(*command, option, path)
            assert done.exit_code == 2, (option, path, done.output)
            names = rf"'({'|'.join(OUTPUTS[command])}|--out|--csv)'"
            assert re.search(rf"Invalid value( for {names}( / {names})?)?: ", said(done)), done.output
            assert re.search("cannot write there|no name for a picture|must name a", said(done))
        if option != "--out" or command[0] not in ("profile", "train"):
            assert "is a directory" in said(invoke(*command, option, "directory.png"))
    assert sorted(tmp_path.rglob("*")) == before, "nothing is left behind"


def test_output_options_all_listed():
    """A new one is tried, too."""
    parsers = (output_file, output_picture, output_directory)
    found = {
        (words, name)
        for words, name, _, option in OPTIONS
        if option.parser in parsers or name in ("out", "csv", "picture")
    }
    tried = {
        (words, name.removeprefix("--"))
        for words in COMMANDS
        for command, names in OUTPUTS.items()
        if command[: len(words)] == words
        for name in names
    }
    assert found <= tried


def test_picture_ending_unknown(tmp_path):
    for path in (tmp_path / "x.xyz", tmp_path / "x"):
        done = invoke("estimate", "demo-cpu", "--out", path)
        assert done.exit_code == 2
        assert "is no name for a picture: give one that ends in .svg or .png" in said(done)


def limited():
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))


@pytest.mark.extended
def test_checkpoint_not_writable(text, tmp_path):
    """As on a full disk: the file's own error, in whose place torch raises another."""
    arguments = ("train", "--data", "text.txt", *TRAIN, "--save-every", 2, "--out", "run")
    assert invoke(*arguments, "--steps", 2).exit_code == 0
    checkpoint = tmp_path / "run" / "lowtide" / "checkpoint.pt"
    before = checkpoint.read_bytes()
    assert len(before) > 200_000
    process = start(*arguments, "--steps", 4, preexec_fn=limited)
    _, errors_ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert errors_ == f"lowtide train: {checkpoint}: file too large\n"
    assert checkpoint.read_bytes() == before
    assert sorted(each.name for each in checkpoint.parent.iterdir()) == ["checkpoint.pt", "log.csv"]


# One place for all errors


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (UserError("as it says"), "as it says"),
        (ArgumentError("softcap must be"), "softcap must be"),
        (OSError(errno.ENOSPC, "No space left on device", "/there/x"), "/there/x: the disk is full"),
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full"),
        (PermissionError(errno.EACCES, "Permission denied", "/there/x"), "/there/x: permission denied"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), "the GPU has not enough memory"),
        (MemoryError(), "there is not enough memory"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:124] ... can't allocate memory"), "not enough memory"),
    ],
)
def test_user_errors_are_sentences(error, message, monkeypatch):
    def fail():
        raise error

    monkeypatch.setattr(doctor, "environment", fail)
    done = invoke("doctor")
    assert done.exit_code == 1
    assert done.stderr.startswith("lowtide doctor: ") or done.stderr.startswith("lowtide: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("linear-cross-entropy --label-smoothing 2", "--label-smoothing must be in [0, 1], got 2.0"),
        ("linear-cross-entropy --softcap -1", "--softcap must be a finite number above 0, got -1.0"),
        ("linear-cross-entropy --backend x", "--backend must be one of 'auto', "),
        ("linear-cross-entropy --workspace 9", "--workspace must hold one row"),
        ("linear-cross-entropy --dtype float64 --backend triton", "--backend triton cannot run this call"),
        ("attention --dropout 2", "--dropout must be in [0, 1], got 2.0"),
        ("attention --bias 1,3,M,N", "--bias must broadcast to 1 batches, 16 heads"),
        ("attention --layout BMK --heads 3", "--heads must be 1 in the layout BMK, got 3"),
    ],
)
def test_errors_of_a_call_name_options(words, message):
    done = invoke("doctor", *words.split())
    assert done.exit_code == 1
    assert done.stderr.startswith(f"lowtide doctor {words.split()[0]}: {message}")
    assert "None for" not in done.stderr


def test_defect_keeps_traceback(monkeypatch):
    for error in (RuntimeError("a defect"), ValueError("a defect"), KeyError("a defect")):
        assert errors.sentence(error) is None

    def fail():
        raise RuntimeError("a defect")

    monkeypatch.setattr(doctor, "environment", fail)
    assert isinstance(invoke("doctor").exception, RuntimeError)


def test_host_memory_message_of_torch():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.float64)
    assert "not enough memory" in errors.sentence(caught.value)
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**45, dtype=torch.float64)
    assert "not enough memory" in errors.sentence(caught.value)


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("profile", "--steps", "2", "script.py"), "--steps"),
        (("profile", "--loss", "eager", "script.py"), "--loss"),
        (("bench", "memory-timeline", "--draw-only", "--smoke"), "--smoke"),
        (("bench", "linear-cross-entropy", "--data", "text.txt"), "--data"),
        (("doctor", "attention", "--no-bias-gradient"), "--bias-gradient"),
    ],
)
def test_options_ignored_are_refused(arguments, option):
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert f"Invalid value for {option}: " in said(done)


def test_option_unknown_before_script():
    assert "No such option: --stepz" in said(invoke("profile", "--stepz", "demo-cpu"))


# The process itself


@pytest.mark.extended
def test_pipe_closed_and_disk_full(plain_environment):
    process = start("doctor", "attention", env=plain_environment)
    process.stdout.close()
    with process.stderr as stderr:
        assert stderr.read() == ""
    assert process.wait(timeout=120) == 1
    with open("/dev/full", "w") as full:
        process = start("doctor", "attention", env=plain_environment, stdout=full)
        _, errors_ = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "Traceback" not in errors_
    assert errors_.startswith("lowtide doctor attention: the disk is full\n")


@pytest.mark.extended
@pytest.mark.parametrize("loss", ["lowtide", "both"])
def test_interrupt_ends_run_silently(loss, text, tmp_path):
    """Ctrl-C in a terminal reaches every process of the group; a run with a child ends with it."""
    endless = ("--data", "text.txt", *TRAIN, "--steps", 10**6, "--save-every", 1, "--loss", loss)
    process = start("train", *endless, "--out", "run", start_new_session=True)
    log = tmp_path / "run" / "lowtide" / "log.csv"
    end = time.monotonic() + 100
    while not log.exists():
        assert time.monotonic() < end, "waited in vain"
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, errors_ = process.communicate(timeout=60)
    assert (process.returncode, errors_) == (130, "")
