"""`lowtide bench chunked-loss`."""

import torch

from lowtide.tools.bench.cases import CASES
from lowtide.tools.bench.chunked import entries
from tests.support.commands import invoke, rows_of

CASE = next(case for case in CASES if case.name == "smoke-cpu")


def test_entries_match_dense_gradients():
    inputs = CASE.inputs(requires_grad=True)
    results = []
    for entry in entries("cpu"):
        call = entry.call(CASE, inputs)
        outputs = call.run()
        results.append([outputs[0].detach(), *torch.autograd.grad(outputs, call.leaves, call.upstream)])
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])


def test_smoke_run(tmp_path):
    out = tmp_path / "chunked.csv"
    done = invoke("bench", "chunked-loss", "--device", "cpu", "--smoke", "--csv", out)
    assert done.exit_code == 0, done.output
    found = {row["provider"]: row for row in rows_of(out)}
    assert list(found) == [entry.name for entry in entries("cpu")]
    dense = int(found["dense"]["peak_bytes"])
    for name, row in found.items():
        assert row["status"] == "ok", row["reason"]
        if "128" in name:  # half of the rows
            assert int(row["peak_bytes"]) < dense


def test_entry_unknown():
    done = invoke("bench", "chunked-loss", "--device", "cpu", "--entry", "fast")
    assert done.exit_code == 2
    assert "gradient_in_forward-128" in done.output
