import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from lowtide.cli import main
from lowtide.cli.shared import progress
from lowtide.tools.estimate.offline import plain
from lowtide.tools.estimate.setting import Dtype, Loss, Setting
from lowtide.tools.estimate.step import estimate as estimated
from tests.support.commands import invoke as in_this_process
from tests.support.commands import said
from tests.support.extended import all_extended_but
from tests.tools.estimate.conftest import TINY_BART, TINY_GPT2, TINY_LLAMA, TINY_LLAVA


@pytest.fixture(autouse=True)
def _nothing_is_zero_by_luck():
    """Not here, where tensors have no data."""


@pytest.fixture(autouse=True)
def _no_progress_is_shown(monkeypatch):
    """However long a busy machine takes to import Transformers."""
    monkeypatch.setattr(progress, "LINE_SECONDS", 1e6)


def invoke(*arguments):
    return in_this_process("estimate", *arguments)


def refused(*arguments):
    done = invoke(*arguments)
    assert done.exit_code == 1, done.output
    (line,) = done.output.splitlines()
    return line


@pytest.mark.extended
def test_llama_3_8b_at_81920_tokens(tmp_path, monkeypatch, capsys):
    """Llama 3 8B, 81,920 tokens: bfloat16 logits of 19.57 GiB, checkpointed hidden states of 20."""
    pytest.importorskip("transformers")
    root = Path(__file__).parents[2]
    docs = (root / "docs" / "start" / "memory.md").read_text()
    assert "lowtide estimate benchmarks/llama-8b --length 81920 --checkpointing --out peak.png\n" in docs
    options = ["--length", "81920", "--checkpointing", "--out", str(tmp_path / "peak.png")]
    monkeypatch.setattr(sys, "argv", ["lowtide", "estimate", str(root / "benchmarks" / "llama-8b"), *options])
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
    for name in ("weights", "gradients", "optimizer", "activations", "logits"):
        eager, ours = found[name]
        assert f"| {name} | {eager:.2f} | {ours:.2f} |" in docs
    assert (tmp_path / "peak.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_built_in_model(tmp_path):
    arguments = ("demo-cpu", "--batch", 12, "--length", 256, "--length", 512)
    table, *pictures = (tmp_path / name for name in ("table.csv", "early.png", "later.png"))
    done = invoke(*arguments, "--csv", table, "--out", pictures[0])
    assert done.exit_code == 0, done.output
    assert "12 x 256 tokens, float32, adamw" in done.output
    assert "12 x 512 tokens, float32, adamw" in done.output
    assert "adamw: 8.8 million parameters" in done.output
    again = invoke(table, "--out", pictures[1])
    assert again.exit_code == 0, again.output
    first, second = (each.read_bytes() for each in pictures)
    assert first == second, "drawn from the CSV alone"
    shown, drawn = (each.output.replace("\n", "") for each in (done, again))  # a long path is broken
    assert drawn.replace("later.png", "early.png") == shown
    assert "1 x 64 tokens, autocast, adamw" in invoke("demo-cuda", "--length", 64).output
    for option in (("--csv", tmp_path / "other.csv"), ("--measure",), ("--batch", 2), ("--workspace", "1MB")):
        done = invoke(table, *option)
        assert done.exit_code == 2
        assert f"Invalid value for {option[0]}: is for a model" in said(done)


def test_ranks(tmp_path):
    """The number of ranks is a part of the table, the CSV and its title."""
    table = tmp_path / "table.csv"
    done = invoke("demo-cpu", "--length", 64, "--fsdp", 4, "--shard-head", "--csv", table)
    assert done.exit_code == 0, done.output
    title = "1 x 64 tokens, float32, adamw, on each of 4 ranks, shard_head"
    assert f"{title}: 8.8 million parameters in all, divided over 4 ranks" in said(done)
    again = invoke(table)
    assert again.exit_code == 0, again.output
    assert again.output == done.output
    for option, reason in (
        (("demo-cpu", "--shard-head"), "--shard-head: divides the head over ranks: give --fsdp"),
        (("demo-cpu", "--fsdp", 2, "--measure"), "--measure: runs one process, and --fsdp asks"),
        (("demo-cpu", "--tp", 2, "--measure"), "--measure: runs one process, and --tp asks"),
        (("demo-cpu", "--tp", 2, "--shard-head"), "--shard-head: divides the head over ranks: give --fsdp"),
        ((table, "--fsdp", 2), "--fsdp: is for a model"),
    ):
        done = invoke(*option)
        assert done.exit_code == 2
        assert f"Invalid value for {reason}" in said(done)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_two_shapes_match_allocator(tmp_path):
    """A small one, whose optimizer counts as much as its logits, and one of 8 times the tokens."""
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


def test_transformers_missing(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    monkeypatch.setitem(sys.modules, "transformers", None)
    line = refused(tmp_path)
    assert f"{tmp_path / 'config.json'} needs transformers (import of transformers halted" in line
    assert line.endswith("install it with: pip install '.[hf]' in lowtide's clone")


def test_config_unreadable(tmp_path):
    path = tmp_path / "config.json"
    assert f"{tmp_path / 'none'}: no such file" in refused(tmp_path / "none")
    assert f"{path}: no such file" in refused(tmp_path)
    path.write_text("not json")
    assert f"{path} is not JSON" in refused(path)
    path.write_text("[" * 100_000)
    assert f"{path} is not JSON" in refused(path)
    path.write_bytes(b"\xff\xfe\x00")
    assert f"{path} is not JSON" in refused(path)
    path.write_text("[1]")
    assert "is not the config of a model" in refused(path)
    half = refused("demo-cpu", "--dtype", "bfloat16")
    assert "demo-cpu trains with float32 weights: give --dtype autocast" in half
    if not torch.cuda.is_available():
        assert "torch sees no CUDA device" in refused("demo-cpu", "--measure")


NETWORK = """
import sys

def refuse(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
        print("the network was asked", event, arguments, file=sys.stderr, flush=True)
        raise OSError("no network here")

sys.addaudithook(refuse)
from lowtide.cli import main
main()
"""
ELSEWHERE = {
    "attn_implementation": "somebody/kernel",
    "_attn_implementation": "somebody/kernel",
    "_attn_implementation_internal": "somebody/kernel",
    "experts_implementation": "somebody/kernel",
    "auto_map": {"AutoConfig": "somebody/model--c.C", "AutoModelForCausalLM": "somebody/model--m.M"},
    "quantization_config": {"quant_method": "somebody/kernel"},
    "_name_or_path": "somebody/model",
    "use_kernels": True,
    "kernel_config": {"RMSNorm": "somebody/kernel:RMSNorm"},
    "backbone": "somebody/backbone",
    "use_pretrained_backbone": True,
    "use_timm_backbone": True,
}


@pytest.mark.extended
def test_config_names_not_looked_up(tmp_path):
    """Nor said to be missing; and the numbers are those of the config without it."""
    pytest.importorskip("transformers")
    nested = {"deeper": ELSEWHERE | {"more": [ELSEWHERE]}}
    for name, content in (("plain", TINY_LLAMA), ("elsewhere", TINY_LLAMA | ELSEWHERE | nested)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(content))
    environment = os.environ | {"HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-c", NETWORK, "estimate", str(tmp_path / "elsewhere"), "--length", "16"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    assert "network" not in done.stderr
    assert "kernel" not in done.stdout + done.stderr
    assert "somebody" not in done.stdout + done.stderr
    departure, _, table = done.stdout.partition("\n")
    assert "quantization_config is left out" in departure
    assert table == invoke(tmp_path / "plain", "--length", 16).stdout
    # Requests that Transformers itself may still send to the hub are refused inside of it.
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    assert constants.HF_HUB_OFFLINE
    with pytest.raises(LocalEntryNotFoundError):
        hf_hub_download("somebody/model", "config.json", cache_dir=tmp_path)


def test_config_names_removed_at_any_depth():
    kept = {"hidden_size": 4, "attn_implementation": "eager", "layers": [{"_attn_implementation": "sdpa"}]}
    assert plain(kept) == kept
    nested = (
        kept | ELSEWHERE | {"attn_implementation": "eager", "layers": [{**kept["layers"][0], "auto_map": {}}]}
    )
    assert plain(nested) == kept
    assert plain({"attn_implementation": {"text_config": "somebody/kernel"}}) == {}


def test_images_and_text(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAVA))
    done = invoke(tmp_path, "--length", 16)
    assert done.exit_code == 0, done.output
    assert "without images or speech" in said(done)
    assert "peak" in done.output


def test_frozen_parameter_has_no_gradient_or_state(tmp_path):
    """AFMoE has one: it was refused by autograd."""
    pytest.importorskip("transformers")
    small = {"model_type": "afmoe", "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32}
    small |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    small |= {"num_experts": 4, "num_experts_per_tok": 2, "num_dense_layers": 1, "vocab_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(small))
    done = invoke(tmp_path, "--length", 16)
    assert done.exit_code == 0, done.output
    assert "peak" in done.output


def test_sequence_too_long(tmp_path):
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = {
        "model_type": "bert",
        "is_decoder": True,
        "vocab_size": 512,
        "max_position_embeddings": 32,
    } | sizes
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert invoke(tmp_path, "--length", 32).exit_code == 0
    path = tmp_path / "config.json"
    longest = "its sequences have at most 32 tokens (max_position_embeddings): give --length 32"
    assert refused(tmp_path, "--length", 33) == f"lowtide estimate: {path}: {longest}"
    for other in (TINY_GPT2 | {"n_positions": 32}, TINY_BART | {"max_position_embeddings": 32}):
        path.write_text(json.dumps(other))  # fake tokens would be found in any table of positions
        assert refused(tmp_path, "--length", 33) == f"lowtide estimate: {path}: {longest}"
    path.write_text(json.dumps(TINY_LLAMA | {"max_position_embeddings": 32}))
    assert invoke(tmp_path, "--length", 33).exit_code == 0  # its positions are computed


@pytest.mark.extended
def test_operator_error_without_traceback(tmp_path):
    pytest.importorskip("transformers")
    config = TINY_LLAMA | {
        "model_type": "deepseek_v2",
        "num_experts_per_tok": None,
        "first_k_dense_replace": 0,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "lowtide", "estimate", str(tmp_path), "--length", "16"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1
    *_, line = done.stderr.splitlines()
    assert line.startswith(f"lowtide estimate: {tmp_path / 'config.json'}: ")
    assert "Traceback" not in done.stderr


def test_progress_of_long_work(capfd, monkeypatch):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.02)
    with progress.progress("1 x 8 tokens, eager") as tell:
        tell("backward")
        deadline = time.monotonic() + 60
        text = ""
        while text.count("\n") < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
            text += capfd.readouterr().err
    assert re.fullmatch(r"1 x 8 tokens, eager: backward, \d+ s", text.splitlines()[0])
    threads = threading.active_count()
    assert capfd.readouterr().out == ""
    assert threads == threading.active_count()


def test_progress_of_each_part():
    words = []
    estimated(Setting("demo-cpu", 1, 8, Dtype.float32), Loss.eager, report=words.append)
    assert words[0] == "building the model"
    assert re.fullmatch(r"forward, module 1 of about \d+", words[1])
    assert words[-2:] == ["backward", "optimizer"]


WRONG = [None, "x", -1, [], {"a": 1}, 1.5, 10**30, "owner/name"]


KEYS = [*TINY_LLAMA, "hidden_act", "rope_parameters", "layer_types"]
SLOW = ("max_position_embeddings", "num_key_value_heads", "rope_parameters", "layer_types")


@pytest.mark.parametrize("key", all_extended_but([each for each in KEYS if each not in SLOW], KEYS))
def test_config_key_of_wrong_type(tmp_path, key):
    """Or does not matter."""
    pytest.importorskip("transformers")
    for value in WRONG:
        config = TINY_LLAMA | {"num_hidden_layers": 1, key: value}
        (tmp_path / "config.json").write_text(json.dumps(config))
        done = invoke(tmp_path, "--length", 16)
        assert done.exception is None or isinstance(done.exception, SystemExit), (key, value)
        if done.exit_code:
            (line,) = done.output.splitlines()
            assert line.startswith(f"lowtide estimate: {tmp_path / 'config.json'}: ")


def test_config_of_no_language_model(tmp_path):
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    for content, message in [
        ({}, "knows no model_type None"),
        ({"model_type": ["llama"]}, "knows no model_type ['llama']"),
        ({"model_type": "lama"}, "knows no model_type 'lama'"),
        ({"model_type": "vit"}, "vit is no language model of transformers"),
        (TINY_LLAMA | {"num_attention_heads": 5}, "attention heads (5)"),
        (TINY_LLAMA | {"hidden_size": "wide"}, "hidden_size"),
    ]:
        path.write_text(json.dumps(content))
        line = refused(path)
        assert line.startswith(f"lowtide estimate: {path}: ")
        assert message in line
