"""`lowtide bench attention --real`, as a user runs it."""

import os
import subprocess
import sys

import pytest

from lowtide.tools.bench.attention.real import REAL_CASES
from tests.support.commands import invoke, rows_of, said

SMOKE = [case for case in REAL_CASES if case.smoke]


@pytest.mark.extended
def test_smoke_run_writes_table_csv_and_picture(tmp_path):
    """In a process of its own: the command line, the file and the figures in it."""
    out, picture = tmp_path / "real.csv", tmp_path / "real.svg"
    command = [sys.executable, "-m", "lowtide", "bench", "attention", "--real", "--smoke", "--device", "cpu"]
    command += ["--csv", str(out), "--plot", str(picture), "--flex", "smoke-packed"]
    # Threads that spin while they wait are slow where other programs use the same cores.
    alone = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=alone)
    assert done.returncode == 0, done.stderr + done.stdout
    rows = {(row["case"], row["provider"]): row for row in rows_of(out)}
    assert {case for case, provider in rows if provider == "lowtide"} == {case.name for case in SMOKE}
    assert [case for case, provider in rows if provider == "flex"] == ["smoke-packed"]
    for case in SMOKE:
        own, torchs = rows[case.name, "lowtide"], rows[case.name, "sdpa"]
        assert own["status"] == "ok", own["reason"]
        assert own["way"]
        assert own["lowtide"]
        errors = [float(own[f"{name}_error"]) for name in case.results]
        assert 0 < max(errors) < 1e-6
        refused = case.softcap or case.sinks
        assert torchs["status"] == ("unavailable" if refused else "ok"), torchs["reason"]
        assert (own["forward_over_torch"] == "") == bool(refused)
        if not refused:
            assert max(float(torchs[f"{name}_error"]) for name in case.results) < 1e-6
            best = rows[case.name, own["best_of_torch"]]
            times = [float(row["forward_ms"]) for row in (own, best)]
            assert float(own["forward_over_torch"]) == pytest.approx(times[0] / times[1], rel=1e-4)
            assert float(best["forward_over_torch"]) == 1
        assert (own["backward_ms"] == "") == case.inference
        assert own["forward_host_us"] == "", "on a CPU the host computes"
    assert rows["smoke-decode", "lowtide"]["engine"] == "sdpa"
    assert rows["smoke-bias", "lowtide"]["engine"] == "torch"
    assert "not taken: a soft cap" in done.stdout
    assert "<svg" in picture.read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--flex", "all"), "goes together with --real"),
        (("--plot", "x.svg"), "goes together with --real"),
        (("--real", "--case", "swin"), "'swin' is not one of swin-b, "),
        (("--real", "--case", "swin-b", "--flex", "swin"), "'swin' is not one of swin-b"),
        (("--real", "--provider", "eagre"), "'eagre' is not one of lowtide, "),
    ],
)
def test_options_refused_before_the_work(arguments, words):
    done = invoke("bench", "attention", "--device", "cpu", *arguments)
    assert done.exit_code == 2
    assert words in said(done)
