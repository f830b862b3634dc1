import argparse
import inspect
import math
import os
import resource
import subprocess
import sys

import pytest
import torch

from lowtide.cli.bench import loss
from lowtide.tools.bench.cases import CASES, Mode
from lowtide.tools.bench.options import OPTIONS, WORKSPACE
from lowtide.tools.bench.providers import PROVIDERS, SWEPT, Provider
from lowtide.tools.bench.steps import rows as steps
from lowtide.tools.bench.steps.cases import STEP_CASES
from tests.support.commands import invoke as in_this_process
from tests.support.commands import rows_of, said


def lowtide(*arguments):
    command = [sys.executable, "-m", "lowtide", "bench", "linear-cross-entropy", *arguments]
    # Threads that spin while they wait make a tiny run many times longer where other tests share
    # the cores.
    patient = os.environ | {"OMP_WAIT_POLICY": "passive"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=patient)


def processor_seconds():
    """Of the processes that have ended, and this one: other people's do not count."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_CHILDREN, resource.RUSAGE_SELF))


@pytest.mark.extended
def test_smoke_run_every_provider(tmp_path):
    out = tmp_path / "results" / "smoke.csv"
    started = processor_seconds()
    done = lowtide("--smoke", "--device", "cpu", "--out", str(out))
    assert processor_seconds() - started < 20
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["provider"]: row for row in rows_of(out)}
    assert list(rows) == [provider.name for provider in PROVIDERS if provider.smoke is not False]
    (case,) = (case for case in CASES if case.smoke and case.device == "cpu")
    for row in rows.values():
        assert row["case"] == case.name
        assert row["provider"] in done.stdout
        assert row["status"] in ("ok", "unavailable"), row["reason"]
        if row["status"] == "unavailable":
            assert row["reason"] in done.stdout
            continue
        p20, ms, p80, *others = (float(row[f]) for f in ("ms_p20", "ms", "ms_p80", "floor_ms", "ratio"))
        assert 0 < p20 <= ms <= p80
        assert all(math.isfinite(each) and each > 0 for each in (p80, *others))
        errors = [float(row[f"{name}_error"]) for name in ("loss", "grad_input", "grad_weight")]
        assert max(errors) < 1e-6
    ours = {name: row for name, row in rows.items() if name.startswith("lowtide") or name == "eager"}
    assert ours.keys() == {
        "eager",
        *(one.name for one in PROVIDERS if one.distribution == "lowtide" and one.smoke is None),
    }
    assert {row["status"] for row in ours.values()} == {"ok"}
    eager_peak = int(ours["eager"]["peak_bytes"])
    assert eager_peak >= 2 * 4 * case.tokens * case.classes
    assert all(int(row["peak_bytes"]) < eager_peak for name, row in ours.items() if name != "eager")


def lowtide_bench(*arguments):
    return in_this_process("bench", *arguments)


def invoke(*arguments):
    return lowtide_bench("linear-cross-entropy", *arguments)


def test_forward_one_provider(tmp_path):
    out = tmp_path / "forward.csv"
    chosen = ("--provider", "eager", "--case", "smoke-cpu", "--mode", "forward", "--device", "cpu")
    done = invoke(*chosen, "--out", str(out))
    assert done.exit_code == 0, done.output
    (row,) = rows_of(out)
    assert (row["provider"], row["mode"], row["status"]) == ("eager", "forward", "ok")
    assert float(row["loss_error"]) < 1e-6
    assert row["grad_input_error"] == ""


def test_trained_logits_from_checkpoint(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text(inspect.getsource(argparse), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tiny = "--device cpu --vocab-size 512 --width 64 --depth 1 --context 32 --batch 8 --steps 60"
    done = in_this_process("train", *f"{tiny} --data text.txt --out head".split())
    assert done.exit_code == 0, done.output
    chosen = "--device cpu --case smoke-cpu --logits trained --checkpoint head --csv trained.csv"
    done = invoke(*f"{chosen} --data text.txt --provider lowtide --provider eager".split())
    assert done.exit_code == 0, done.output
    assert "smoke-cpu-trained: 256 x 64 x 512 float32 on cpu, step, trained logits up to" in done.output
    rows = rows_of(tmp_path / "trained.csv")
    assert [row["provider"] for row in rows] == ["lowtide", "eager"]
    for row in rows:
        assert (row["status"], row["logits"]) == ("ok", "trained")
        assert float(row["largest_logit"]) > 3, "those of a fresh head are below 1"
        assert (row["tokens"], row["features"], row["classes"]) == ("256", "64", "512")
        errors = [float(row[f"{name}_error"]) for name in ("loss", "grad_input", "grad_weight")]
        assert max(errors) < 1e-6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--logits trained", "goes together with --logits trained"),
        ("--checkpoint head", "goes together with --logits trained"),
        ("--logits trained --checkpoint head --sweep tokens", "takes random logits"),
        ("--sweep depth", "'depth' is not one of 'tokens', 'classes', 'features'"),
    ],
)
def test_options_incompatible(arguments, message):
    done = invoke("--device", "cpu", *arguments.split())
    assert done.exit_code == 2
    assert message in said(done)


def test_checkpoint_missing():
    chosen = ["--device", "cpu", "--logits", "trained", "--checkpoint", "nowhere"]
    done = invoke(*chosen)
    advice = "there is no checkpoint.pt; make one with: lowtide train --out nowhere"
    assert (done.exit_code, done.output) == (
        1,
        f"lowtide bench linear-cross-entropy: --checkpoint nowhere: {advice}\n",
    )


def test_sweep_measured_and_drawn(tmp_path):
    out, figure = tmp_path / "sweep.csv", tmp_path / "sweep.svg"
    chosen = [
        "--device",
        "cpu",
        "--smoke",
        "--provider",
        "lowtide",
        "--provider",
        "liger",
        "--sweep",
        "tokens",
    ]
    done = invoke(*chosen, "--csv", out)
    assert done.exit_code == 0, done.output
    rows = rows_of(out)
    ours = [(int(row["tokens"]), row["status"]) for row in rows if row["provider"] == "lowtide"]
    assert ours == [(size, "ok") for size in (32, 64, 128, 256, 512)]
    assert {(row["features"], row["classes"]) for row in rows} == {("64", "1024")}
    assert {row["reason"] for row in rows if row["provider"] == "liger"} == {"its kernels need CUDA"}
    done = lowtide_bench("draw", out, "--out", figure)
    assert done.exit_code == 0, done.output
    assert figure.read_text().startswith("<?xml")


def test_sweep_default_providers_and_case(monkeypatch):
    seen = []
    monkeypatch.setattr(loss, "print_tables", lambda tables, *rest: seen.extend(tables))
    for more in ([], ["--case", "smoke-cpu", "--case", "cpu", "--provider", "liger-fp32"]):
        chosen = ["linear-cross-entropy", "--device", "cpu", "--sweep", "classes", *more]
        assert lowtide_bench(*chosen).exit_code == 0
    assert [table.name for table in seen[:5]] == [
        *(f"cpu-small-classes-{size}" for size in (1024, 2048, 4096)),
        "cpu-small",
        "cpu-small-classes-16384",
    ]
    assert {table.total for table in seen[:5]} == {len(SWEPT)}
    assert len(seen) == 15
    assert {table.total for table in seen[5:]} == {1}
    assert set(SWEPT) < {provider.name for provider in PROVIDERS}
    assert {loss.SWEPT_CASE[case.device] for case in CASES} <= {case.name for case in CASES}


def test_shapes_by_name_run_by_name_alone():
    usual = [case.name for case in loss._cases("cuda", None, False, {})]
    assert {"A", "B", "B-1024"} <= {*usual}
    named = {case.name: case for case in CASES if case.by_name}
    assert not {*usual} & {*named}
    assert [case.name for case in loss._cases("cuda", [*named], False, {})] == [*named]
    whole = next(case for case in CASES if case.name == "B")
    assert named["B-classes-32064"].classes / 2 == whole.classes / 8, "of two cards, what one of eight has"
    assert {*loss.FSDP_CASE.values()} <= {case.name for case in CASES}


def options(*arguments):
    return lowtide_bench("options", "--device", "cpu", *arguments)


def test_smoke_run_every_option(tmp_path):
    out = tmp_path / "results" / "options.csv"
    started = processor_seconds()
    done = options("--smoke", "--csv", str(out))
    assert processor_seconds() - started < 20
    assert done.exit_code == 0, done.output
    rows = rows_of(out)
    expected = [(mode.value, option.name) for mode in Mode for option in OPTIONS[mode]]
    assert [(row["mode"], row["provider"]) for row in rows] == expected
    for row in rows:
        assert row["case"] == "smoke-cpu"
        assert row["provider"] in done.output
        assert row["status"] in ("ok", "unavailable"), row["reason"]
        if row["provider"] in ("liger", "quack"):
            assert row["status"] == "unavailable"
            continue
        times = {name: float(row[name]) for name in ("ms", "floor_ms", "plain_ms", "ratio")}
        assert all(math.isfinite(time) and time > 0 for time in times.values())
        assert math.isfinite(float(row["over_plain"]))
        assert int(row["peak_bytes"]) > 0
        ours = row["mode"] == "step" and row["provider"] != "eager-none"
        assert row["workspace"] == (str(WORKSPACE) if ours else "")


def test_options_one_mode_other_workspace(tmp_path):
    out = tmp_path / "options.csv"
    chosen = ("--case", "smoke-cpu", "--option", "none", "--option", "softcap", "--workspace", "512MiB")
    done = options(*chosen, "--out", str(out))
    assert done.exit_code == 0, done.output
    rows = [(row["mode"], row["provider"], row["workspace"]) for row in rows_of(out)]
    half = str(2**29)
    assert rows == [("step", "softcap", half), ("step", "none", half), ("forward", "none", "")]
    done = options(*chosen, "--mode", "forward")
    assert done.exit_code == 2, "a call without gradients has none"
    assert "--workspace: is for calls with gradients" in said(done)
    done = options(*chosen[:-2], "--mode", "forward", "--out", str(out))
    assert "softcap" in done.output
    assert done.exit_code == 2, "no forward of this name"


def test_options_default_case(monkeypatch):
    seen = []
    monkeypatch.setattr(loss, "print_tables", lambda tables, *rest: seen.extend(one.name for one in tables))
    assert options().exit_code == 0
    assert seen == ["cpu-small", "cpu-small"], "a table a mode"
    assert {loss.OPTIONS_CASE[case.device] for case in CASES} <= {case.name for case in CASES}


@pytest.mark.parametrize("command", ["linear-cross-entropy", "options"])
@pytest.mark.parametrize(
    ("option", "typo", "known"),
    [("--provider", "eagre", "eager"), ("--case", "smok", "smoke-cpu"), ("--device", "gpu", "cpu")],
)
def test_name_unknown(command, option, typo, known):
    if command == "options" and option == "--provider":
        option, typo, known = "--option", "softcup", "softcap"
    done = lowtide_bench(command, option, typo)
    assert done.exit_code == 2
    assert typo in done.output
    assert known in done.output


def test_failure_row_and_exit_status(monkeypatch):
    def broken(case):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(loss, "PROVIDERS", (Provider("broken", "torch", broken),))
    for arguments, exit_code in ((["--smoke"], 1), (["--case", "smoke-cpu"], 0)):
        done = invoke("--device", "cpu", *arguments)
        assert done.exit_code == exit_code, done.output
        assert "broken failed: RuntimeError: out of luck" in done.output


def test_steps_compute_the_same_loss(tmp_path):
    pytest.importorskip("transformers")
    out = tmp_path / "steps.csv"
    done = in_this_process("bench", "steps", "--smoke", "--csv", str(out))
    assert done.exit_code == 0, done.output
    rows = {row["provider"]: row for row in rows_of(out)}
    assert {name for name, row in rows.items() if row["status"] == "ok"} >= {"eager", "lowtide"}
    losses = {float(row["step_loss"]) for row in rows.values() if row["status"] == "ok"}
    assert max(losses) - min(losses) <= 2e-6 * max(losses)
    eager, own = rows["eager"], rows["lowtide"]
    assert float(eager["tokens_per_second"]) == pytest.approx(64e3 / float(eager["ms"]), rel=1e-4)
    model = 3 * 4 * int(own["parameters"])  # includes AdamW's two moments
    assert model < int(own["peak_bytes"]) < int(eager["peak_bytes"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_steps_without_a_card():
    done = in_this_process("bench", "steps", "--device", "cpu")
    assert done.exit_code == 1
    assert "--smoke runs a small model on the CPU" in done.output


@pytest.mark.parametrize("when", ["built", "timed"])
def test_steps_that_fail_are_rows(tmp_path, monkeypatch, when):
    """Each provider's row says that the model does not fit; the next model is measured."""
    pytest.importorskip("transformers")

    def fails(*_):
        raise torch.OutOfMemoryError("80 GiB are not enough")

    monkeypatch.setattr(steps, "_training" if when == "built" else "alternate", fails)
    rows = list(steps.step_rows(next(case for case in STEP_CASES if case.smoke)))
    assert [row.provider for row in rows] == [*steps.STEP_PROVIDERS]
    assert all(row.figures is None and not row.failed for row in rows)
    missing = [row for row in rows if "80 GiB are not enough" in row.reason]
    assert {"eager", "lowtide"} <= {row.provider.name for row in missing}
