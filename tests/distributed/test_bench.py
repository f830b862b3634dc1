"""`lowtide bench linear-cross-entropy --tp` under torchrun: each rank a part of the classes."""

import csv

import pytest
import torch
import torch.distributed as dist

from lowtide.tools.bench.cases import Case
from tests.support.commands import invoke
from tests.support.ranks import torchrun

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs torch.distributed with gloo"
)
BENCH = ("bench", "linear-cross-entropy", "--device", "cpu", "--smoke")


def test_rows_of_uneven_shards(tmp_path):
    names = ("lowtide", "lowtide-64MiB", "loss-parallel")
    options = ("--tp", "3", *(word for name in names for word in ("--provider", name)), "--out", "tp.csv")
    done = torchrun(tmp_path, *BENCH, *options, ranks=3)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("smoke-cpu-tp3: 256 x 64 x 1024 float32 on cpu, classes over 3 ranks, step") == 1
    with (tmp_path / "tp.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["provider"] for row in rows] == [*names]
    for row in rows:
        assert (row["case"], row["classes"], row["status"]) == ("smoke-cpu-tp3", "1024", "ok"), row["reason"]
        assert row["command"].startswith("torchrun --nproc-per-node=3 -m lowtide bench linear-cross-entropy")
        errors = [float(row[f"{name}_error"]) for name in ("loss", "grad_input", "grad_weight")]
        assert 0 < max(errors) < 1e-6
        assert 0 < float(row["floor_ms"]) < float(row["ms"])
        assert int(row["peak_bytes"]) > 0


def test_shards_hold_each_class_once():
    """By torch.chunk's rule, by which the last may be empty."""
    for classes, ranks in ((1024, 3), (10, 4), (5, 4), (8, 2), (7, 1)):
        case = Case("case", 4, 2, classes, torch.float32, "cpu", ranks=ranks)
        held = [torch.arange(classes)[Case(**(vars(case) | {"rank": r})).own_classes] for r in range(ranks)]
        assert torch.equal(torch.cat(held), torch.arange(classes))
        chunks = torch.arange(classes).chunk(ranks)
        assert [len(each) for each in held if len(each)] == [len(each) for each in chunks]


def test_needs_torchrun():
    done = invoke(*BENCH, "--tp", "2")
    assert done.exit_code == 1
    assert "--tp needs the ranks of torchrun: torchrun --nproc-per-node=2 -m lowtide bench" in done.output
    assert done.output.count("\n") == 1


@pytest.mark.extended
def test_other_number_of_ranks(tmp_path):
    for options, said in (
        (("--tp", "3"), "--tp 3: torchrun has started 2;"),
        ((), "which would each do the same: give --tp 2, or leave torchrun out"),
    ):
        done = torchrun(tmp_path, *BENCH, *options)
        assert done.returncode == 1
        assert done.stderr.count(said) == 1
