"""`lowtide bench attention`, as a user runs it."""

import math

import pytest

from lowtide.cli.bench import attention
from lowtide.tools.bench.attention.cases import ATTENTION_CASES
from lowtide.tools.bench.attention.providers import ATTENTION_PROVIDERS
from tests.support.commands import invoke as in_this_process
from tests.support.commands import rows_of

SMOKE = [case for case in ATTENTION_CASES if case.smoke and case.device == "cpu"]


def test_smoke_run_every_provider(tmp_path):
    out = tmp_path / "results" / "attention.csv"
    done = invoke("--smoke", "--csv", out)
    assert done.exit_code == 0, done.output
    rows = rows_of(out)
    assert len(rows) == len(SMOKE) * len(ATTENTION_PROVIDERS)
    found = {(row["case"], row["provider"]): row for row in rows}
    assert found.keys() == {(case.name, each.name) for case in SMOKE for each in ATTENTION_PROVIDERS}
    for (case, provider), row in found.items():
        assert provider in done.stdout
        assert row["status"] in ("ok", "unavailable"), row["reason"]
        if row["status"] == "unavailable":
            assert row["reason"] in done.stdout
            continue
        for name in ("forward", "backward"):
            ms, rate, ratio = (float(row[f"{name}_{field}"]) for field in ("ms", "tflops", "ratio"))
            assert all(math.isfinite(value) and value > 0 for value in (ms, rate, ratio))
        errors = [row[f"{name}_error"] for name in ("out", "grad_query", "grad_key", "grad_value")]
        if case == "smoke-cpu-dropout":
            assert set(errors) == {""}
        else:
            assert max(map(float, errors)) < 1e-6
        assert (row["grad_bias_error"] != "") == (case == "smoke-cpu-bias")
    for case in SMOKE:
        assert {found[case.name, name]["status"] for name in ("lowtide", "sdpa", "eager")} == {"ok"}
        best = [row for row in rows if row["case"] == case.name and row["step_ratio"] and not row["engine"]]
        assert max(float(row["step_ratio"]) for row in best) == 1
    assert found["smoke-cpu", "lowtide"]["engine"] == "sdpa"
    assert found["smoke-cpu-bias", "lowtide"]["engine"] == "torch"


def invoke(*arguments):
    return in_this_process("bench", "attention", "--device", "cpu", *arguments)


def test_cases_and_providers_by_name(tmp_path):
    out = tmp_path / "attention.csv"
    chosen = ("--case", "smoke-cpu", "--provider", "eager", "--provider", "lowtide")
    done = invoke(*chosen, "--csv", str(out))
    assert done.exit_code == 0, done.output
    assert [row["provider"] for row in rows_of(out)] == ["eager", "lowtide"]


def test_longest_cases_by_name_only(monkeypatch):
    seen = []
    monkeypatch.setattr(
        attention, "print_tables", lambda tables, *rest: seen.extend(one.name for one in tables)
    )
    monkeypatch.setattr(attention, "choose_device", lambda device: "cuda")
    assert invoke().exit_code == 0
    assert "bias-scores" in seen
    assert "million" not in seen
    seen.clear()
    assert invoke("--case", "million").exit_code == 0
    assert seen == ["million"]


def test_cases_without_some_providers(monkeypatch):
    seen = []
    monkeypatch.setattr(attention, "print_tables", lambda tables, *rest: None)
    monkeypatch.setattr(attention, "choose_device", lambda device: "cuda")
    monkeypatch.setattr(
        attention, "attention_rows", lambda case, providers: seen.append([p.name for p in providers])
    )
    names = [provider.name for provider in ATTENTION_PROVIDERS]
    for arguments in ((), ("--provider", "flex")):
        assert invoke("--case", "plain-64", "--case", "bias-keys", *arguments).exit_code == 0
    left_out = [name for name in names if name not in ("lowtide-triton", "flex")]
    assert seen == [left_out, names, ["flex"], ["flex"]]


@pytest.mark.parametrize(
    ("option", "typo", "known"), [("--provider", "eagre", "eager"), ("--case", "smok", "smoke-cpu")]
)
def test_name_unknown(option, typo, known):
    done = invoke(option, typo)
    assert done.exit_code == 2
    assert known in done.output
