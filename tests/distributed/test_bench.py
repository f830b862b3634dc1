"""`lowtide bench` under torchrun: each rank with classes, or under FSDP2 tokens, of its own."""

from dataclasses import replace

import pytest
import torch

from lowtide.tools.bench.cases import LossCase
from lowtide.tools.bench.steps import rows as steps
from lowtide.tools.bench.steps.cases import STEP_CASES
from tests.support.cards import on_cards
from tests.support.commands import invoke, rows_of, said
from tests.support.ranks import needs_gloo, torchrun

pytestmark = needs_gloo
BENCH = ("bench", "linear-cross-entropy", "--device", "cpu", "--smoke")


def test_rows_of_uneven_shards(tmp_path):
    names = ("lowtide", "lowtide-64MiB", "lowtide-no-collectives", "loss-parallel")
    options = ("--tp", "3", *(word for name in names for word in ("--provider", name)), "--out", "tp.csv")
    done = torchrun(tmp_path, *BENCH, *options, ranks=3)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("smoke-cpu-tp3: 256 x 64 x 1024 float32 on cpu, classes over 3 ranks, step") == 1
    rows = rows_of(tmp_path / "tp.csv")
    assert [row["provider"] for row in rows] == [*names]
    for row in rows:
        assert (row["case"], row["classes"], row["status"]) == ("smoke-cpu-tp3", "1024", "ok"), row["reason"]
        assert row["command"].startswith("torchrun --nproc-per-node=3 -m lowtide bench linear-cross-entropy")
        errors = [row[f"{name}_error"] for name in ("loss", "grad_input", "grad_weight")]
        if row["provider"] == "lowtide-no-collectives":
            assert errors == [""] * 3, "its results are wrong by design"
        else:
            assert 0 < max(map(float, errors)) < 1e-6
        assert 0 < float(row["floor_ms"]) < float(row["ms"])
        assert int(row["peak_bytes"]) > 0


@pytest.mark.extended
def test_rows_of_a_head_under_fsdp(tmp_path):
    """Errors are against float64, of the loss, each rank's dX and its uneven shard of dW."""
    done = torchrun(tmp_path, *BENCH, "--fsdp", "3", "--csv", "fsdp.csv", ranks=3)
    assert done.returncode == 0, done.stderr
    title = "smoke-cpu-fsdp3: 256 x 64 x 1024 float32 on cpu, tokens of each of 3 ranks, step"
    assert done.stdout.count(title) == 1
    rows = {row["provider"]: row for row in rows_of(tmp_path / "fsdp.csv")}
    assert [*rows] == ["eager", "lowtide", "lowtide-shard-head"]
    for row in rows.values():
        assert (row["case"], row["tokens"], row["status"]) == ("smoke-cpu-fsdp3", "256", "ok"), row["reason"]
        errors = [float(row[f"{name}_error"]) for name in ("loss", "grad_input", "grad_weight")]
        assert 0 < max(errors) < 1e-6
    peaks = {name: int(row["peak_bytes"]) for name, row in rows.items()}
    logits, head = 4 * 256 * 1024, 4 * 1024 * 64
    assert peaks["eager"] >= 2 * logits + head
    assert head <= peaks["lowtide"] < peaks["eager"]
    assert 0 < peaks["lowtide-shard-head"] < peaks["eager"]


def test_steps_under_fsdp(tmp_path):
    """Each provider has the loss of one process on the ranks' tokens, one batch after the other."""
    pytest.importorskip("transformers")
    done = torchrun(tmp_path, "bench", "steps", "--smoke", "--fsdp", "2", "--csv", "steps.csv")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("smoke-untied: 0.00 billion parameters, 2 x 32 tokens on each of 2 ranks") == 1
    rows = {row["provider"]: row for row in rows_of(tmp_path / "steps.csv")}
    ran = [name for name, row in rows.items() if row["status"] == "ok"]
    assert {"eager", "lowtide", "lowtide-shard-head"} <= {*ran}, [row["reason"] for row in rows.values()]
    assert rows["liger"]["status"] == "unavailable"

    smoke = next(case for case in STEP_CASES if case.smoke)
    untied = replace(smoke, fields=smoke.fields | {"tie_word_embeddings": False})
    one = steps._training(untied, shards_head=False)
    losses = [steps._step(replace(untied, rank=rank), *one, steps.EAGER).item() for rank in range(2)]
    held = 3 * 4 * sum(each.numel() for each in one[0].parameters()) / 2  # includes AdamW's two moments
    peaks = []
    for name in ran:
        row = rows[name]
        assert (row["model"], row["ranks"], row["command"].split()[0]) == ("smoke-untied", "2", "torchrun")
        assert float(row["step_loss"]) == pytest.approx(sum(losses) / 2, abs=1e-5)
        assert float(row["tokens_per_second"]) == pytest.approx(2 * 64e3 / float(row["ms"]), rel=1e-4)
        assert int(row["parameters"]) * 6 == held
        peaks.append(int(row["peak_bytes"]))
    # 64 tokens of a rank and 1000 classes: eager holds logits, and FSDP2 a whole head.
    assert peaks[0] > peaks[1] > peaks[2] > held


@pytest.mark.parametrize("device", [on_cards(2)])
def test_rows_on_cards(tmp_path, device):
    """Errors of bfloat16 are held against those of torch's own loss_parallel."""
    options = ("--tp", "2", "--provider", "loss-parallel", "--provider", "lowtide", "--out", "tp.csv")
    done = torchrun(
        tmp_path, "bench", "linear-cross-entropy", "--device", device, "--smoke", *options, ranks=2
    )
    assert done.returncode == 0, done.stderr
    rows = {row["provider"]: row for row in rows_of(tmp_path / "tp.csv")}
    assert rows.keys() == {"loss-parallel", "lowtide"}
    for row in rows.values():
        assert (row["case"], row["classes"], row["status"]) == ("smoke-cuda-tp2", "2048", "ok"), row["reason"]
        assert 0 < float(row["floor_ms"]) < float(row["ms"])
    for name in ("loss_error", "grad_input_error", "grad_weight_error"):
        assert float(rows["lowtide"][name]) <= 2 * float(rows["loss-parallel"][name]), name


def test_shards_hold_each_class_once():
    """By torch.chunk's rule, by which the last may be empty."""
    for classes, ranks in ((1024, 3), (10, 4), (5, 4), (8, 2), (7, 1)):
        case = LossCase("case", 4, 2, classes, torch.float32, "cpu", ranks=ranks)
        held = [
            torch.arange(classes)[LossCase(**(vars(case) | {"rank": r})).own_classes] for r in range(ranks)
        ]
        assert torch.equal(torch.cat(held), torch.arange(classes))
        chunks = torch.arange(classes).chunk(ranks)
        assert [len(each) for each in held if len(each)] == [len(each) for each in chunks]


@pytest.mark.parametrize("command", [(*BENCH, "--tp"), (*BENCH, "--fsdp"), ("bench", "steps", "--fsdp")])
def test_needs_torchrun(command):
    done = invoke(*command, "2")
    assert done.exit_code == 1
    again = f"torchrun --nproc-per-node=2 -m lowtide bench {command[1]} {command[-1]} 2"
    assert f"{command[-1]} needs the ranks of torchrun: {again}" in done.output
    assert done.output.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tp", "2", "--fsdp", "2"), "--tp and --fsdp: each divides all ranks in a way of its own"),
        (
            ("--fsdp", "2", "--logits", "trained", "--checkpoint", "runs"),
            "--fsdp: takes random logits: each rank has its own",
        ),
    ],
)
def test_options_that_do_not_go_together(options, message):
    done = invoke(*BENCH, *options)
    assert done.exit_code == 2
    assert message in said(done)


@pytest.mark.extended
def test_other_number_of_ranks(tmp_path):
    for options, message in (
        (("--tp", "3"), "--tp 3: torchrun has started 2;"),
        ((), "which would each do the same: give --tp 2 or --fsdp 2, or leave torchrun out"),
    ):
        done = torchrun(tmp_path, *BENCH, *options)
        assert done.returncode == 1
        assert done.stderr.count(message) == 1
