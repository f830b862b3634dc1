"""`lowtide doctor`, as a user runs it."""

import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from lowtide.cli import doctor
from lowtide.doctor.attention import table


def invoke(*arguments):
    return CliRunner().invoke(doctor.app, arguments)


def test_the_machine_and_the_table(plain_environment):
    done = subprocess.run(
        [sys.executable, "-m", "lowtide", "doctor"], capture_output=True, text=True, env=plain_environment
    )
    assert done.returncode == 0, done.stderr
    assert torch.__version__ in done.stdout
    assert "triton" in done.stdout
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    for row in table():
        assert " ".join(row) in lines


def test_a_call_of_attention():
    done = invoke("attention", "--device", "cpu", "--bias", "1,H,M,N", "--heads", "2", "--queries", "64")
    assert done.exit_code == 0, done.output
    assert "torch" in done.output
    assert "its biases are dense" in done.output
    options = ("--mask", "causal", "--key-heads", "4", "--layout", "BHMK", "--dtype", "float16")
    done = invoke("attention", "--device", "cuda", *options)
    assert "sdpa" in done.output
    assert "H 16/4 K 64 float16 on cuda" in done.output
    done = invoke("attention", "--window", "128", "0", "--dropout", "0.1", "--softcap", "30", "--logsumexp")
    assert "it gives no logsumexp" in done.output


def test_a_call_of_the_loss():
    sizes = ("--tokens", "1000", "--features", "64", "--classes", "3000")
    done = invoke("linear-cross-entropy", "--device", "cpu", *sizes, "--workspace", "20")
    assert done.exit_code == 0, done.output
    assert "20 MiB" in done.output
    assert "1000 a chunk, 1 chunk" in done.output
    assert "its gradient" in done.output
    assert "its gradient" not in invoke("linear-cross-entropy", *sizes, "--no-gradients").output


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("attention", "--device", "cpu", "--heads", "6", "--key-heads", "4"), 1, "must be a multiple"),
        (("attention", "--bias", "1,H,X"), 2, "must be sizes or"),
        (("attention", "--mask", "diagonal"), 2, "causal-from-bottom-right"),
        (("attention", "--device", "tpu"), 2, "not one of cpu, cuda"),
        (("linear-cross-entropy", "--device", "cpu", "--workspace", "0.1"), 1, "workspace must hold"),
    ],
)
def test_what_cannot_be_run_is_answered_in_the_words_of_the_call(arguments, code, message):
    done = invoke(*arguments)
    assert done.exit_code == code
    assert message in done.output.replace("\n", " ")
