import json
import re
import sys
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from lowtide.cli import main
from lowtide.cli.estimate import estimate
from tests.estimate.conftest import LLAMA_3_8B, TINY_LLAMA


@pytest.fixture(autouse=True)
def _nothing_is_zero_by_luck():
    """Not here, where tensors have no data."""


def invoke(*arguments):
    app = typer.Typer()
    app.command()(estimate)
    return CliRunner().invoke(app, list(map(str, arguments)))


def refused(*arguments):
    done = invoke(*arguments)
    assert done.exit_code == 1, done.output
    (line,) = done.output.splitlines()
    return line


def test_the_arithmetic_of_the_first_request(tmp_path, monkeypatch, capsys):
    """Llama 3 8B, 81,920 tokens: logits of 19.57 GiB in bfloat16, checkpointed hidden states of 20."""
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B))
    options = ["--length", "81920", "--checkpointing", "--out", str(tmp_path / "peak.png")]
    monkeypatch.setattr(sys, "argv", ["lowtide", "estimate", str(tmp_path), *options])
    with pytest.raises(SystemExit) as done:
        main()
    output = capsys.readouterr().out
    assert done.value.code == 0, output
    assert "8.030 billion parameters" in output
    assert "one copy of the logits 19.57 GiB, one hidden state a layer 20.00 GiB" in output
    rows = [line.replace("│", " ").split() for line in output.splitlines()]
    found = {
        row[0]: [float(each) for each in row[1:]] for row in rows if len(row) == 3 and row[2][0].isdigit()
    }
    assert found["weights"] == [14.96, 14.96]
    assert found["optimizer"] == [29.92, 29.92]
    # Three copies in float32: the log-softmax, its gradient, the gradient of what picks the target.
    assert found["logits"][0] == pytest.approx(6 * 19.57, rel=1e-3)
    assert min(found["activations"]) > 20
    assert found["peak"][1] < found["peak"][0] - 90
    docs = (Path(__file__).parents[2] / "docs" / "estimate.md").read_text()
    for name in ("weights", "gradients", "optimizer", "activations", "logits"):
        eager, ours = found[name]
        assert f"| {name} | {eager:.2f} | {ours:.2f} |" in docs
    assert (tmp_path / "peak.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_built_in_model_needs_nothing_else(tmp_path):
    arguments = ("demo-cpu", "--batch", 12, "--length", 256, "--length", 512)
    table, *pictures = (tmp_path / name for name in ("table.csv", "early.png", "later.png"))
    done = invoke(*arguments, "--csv", table, "--out", pictures[0])
    assert done.exit_code == 0, done.output
    assert "12 x 256 tokens, float32, adamw" in done.output
    assert "12 x 512 tokens, float32, adamw" in done.output
    again = invoke(table, "--out", pictures[1])
    assert again.exit_code == 0, again.output
    first, second = (each.read_bytes() for each in pictures)
    assert first == second, "drawn from the CSV alone"
    shown, drawn = (each.output.replace("\n", "") for each in (done, again))  # a long path is broken
    assert drawn.replace("later.png", "early.png") == shown
    assert "1 x 64 tokens, autocast, adamw" in invoke("demo-cuda", "--length", 64).output
    assert f"{table} is shown as it was written" in refused(table, "--csv", tmp_path / "other.csv")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_two_shapes_are_what_the_allocator_counts(tmp_path):
    """A small one, whose optimizer counts as much as its logits, and one of eight times the tokens."""
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "vocab_size": 65_536}
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA | sizes))
    assert_within_a_tenth(tmp_path, 2048, 16_384)


def assert_within_a_tenth(directory, *lengths):
    done = invoke(directory, *(each for length in lengths for each in ("--length", length)), "--measure")
    assert done.exit_code == 0, done.output
    errors = [float(each) for each in re.findall(r"([+-][\d.]+) %", done.output)]
    assert len(errors) == 2 * len(lengths), done.output
    assert max(map(abs, errors)) < 10, done.output


def test_what_cannot_be_estimated_is_one_clear_line(tmp_path):
    path = tmp_path / "config.json"
    assert f"{tmp_path / 'none'}: no such file" in refused(tmp_path / "none")
    assert f"{path}: no such file" in refused(tmp_path)
    path.write_text("not json")
    assert f"{path} is not JSON" in refused(path)
    path.write_text("[1]")
    assert "is not the config of a model" in refused(path)
    half = refused("demo-cpu", "--dtype", "bfloat16")
    assert "demo-cpu trains with float32 weights: give --dtype autocast" in half
    if not torch.cuda.is_available():
        assert "torch sees no CUDA device" in refused("demo-cpu", "--measure")


def test_what_is_no_language_model_is_one_clear_line(tmp_path):
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    for content, message in [
        ({}, "knows no model_type None"),
        ({"model_type": "lama"}, "knows no model_type 'lama'"),
        ({"model_type": "vit"}, "vit is no causal language model"),
        (TINY_LLAMA | {"num_attention_heads": 5}, "attention heads (5)"),
        (TINY_LLAMA | {"hidden_size": "wide"}, "hidden_size"),
    ]:
        path.write_text(json.dumps(content))
        line = refused(path)
        assert line.startswith(f"lowtide estimate: {path}: ")
        assert message in line
