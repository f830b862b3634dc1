"""The shapes of public models in `lowtide bench attention --real`: data and rows."""

import dataclasses
import io

import pytest
import torch
from rich.console import Console

from lowtide.tools.bench.attention import rows as attention
from lowtide.tools.bench.attention.providers import ATTENTION_PROVIDERS, AttentionProvider, own_choice
from lowtide.tools.bench.attention.real import REAL_CASES, real_cases
from lowtide.tools.bench.attention.real_table import (
    COLUMNS,
    REAL_PROVIDERS,
    REAL_ROWS,
    RealRow,
    real_rows,
    record,
)
from lowtide.tools.bench.attention.rows import AttentionFigures, Pass, attention_rows

PUBLIC = [case for case in REAL_CASES if not case.smoke]
SMOKE = [case for case in REAL_CASES if case.smoke]
ON_CPU = [case for case in real_cases("cpu") if not case.smoke]
BY_NAME = {case.name: case for case in REAL_CASES}
PROVIDERS = {provider.name: provider for provider in ATTENTION_PROVIDERS}


def test_cases_are_those_of_public_models():
    assert len(PUBLIC) >= 50
    assert len(BY_NAME) == len(REAL_CASES)
    for case in PUBLIC:
        assert case.model.name
        assert case.model.source.count("/") == 1
        assert case.model.checked in ("transformers", "code", "")
        assert not case.lengths or (sum(case.lengths) == case.M and case.B == 1)
        assert case.H % case.key_heads == 0


# Cases whose numbers are the defaults of a config class: its name, its heads and key heads.
CONFIGS = {
    "beit-b": ("beit", "num_attention_heads", "num_attention_heads"),
    "gpt-oss-global": ("gpt_oss", "num_attention_heads", "num_key_value_heads"),
    "gpt-oss-local": ("gpt_oss", "num_attention_heads", "num_key_value_heads"),
    "mistral-local": ("mistral", "num_attention_heads", "num_key_value_heads"),
    "gpt-2-fp32": ("gpt2", "n_head", "n_head"),
    "packed-local": ("modernbert", "num_attention_heads", "num_attention_heads"),
    "padded": ("bert", "num_attention_heads", "num_attention_heads"),
    "mla": ("deepseek_v3", "num_attention_heads", "num_attention_heads"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_cases_match_transformers(name):
    mapping = pytest.importorskip("transformers").CONFIG_MAPPING
    kind, heads, key_heads = CONFIGS[name]
    if kind not in mapping:
        pytest.skip(f"this transformers has no {kind}")
    config, case = mapping[kind](), BY_NAME[name]
    assert case.model.checked == "transformers"
    assert (case.H, case.key_heads) == (getattr(config, heads), getattr(config, key_heads))
    if kind == "deepseek_v3":
        assert (config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim) == (case.K, case.E)
    else:
        features = getattr(config, "head_dim", None) or config.hidden_size // case.H
        assert (features, features) == (case.K, case.value_features)
    if kind in ("gpt_oss", "mistral") and case.window:
        assert config.sliding_window == case.window[0] + 1, "the query's own key counts"
    if kind == "modernbert":
        assert config.local_attention == sum(case.window)


def test_models_that_transformers_checks_are_tested():
    checked = {case.model for case in PUBLIC if case.model.checked == "transformers"}
    assert {BY_NAME[name].model for name in CONFIGS} == checked


TAKEN = {
    "sdpa": {"smoke-softcap": "not taken: a soft cap", "smoke-sinks": "not taken: sinks"},
    "lowtide": {},
    "eager": {},
    "lowtide-torch": {},
}


@pytest.mark.parametrize("case", SMOKE, ids=lambda case: case.name)
def test_providers_compute_the_definition(case):
    rows = {row.provider.name: row for row in attention_rows(case, [PROVIDERS[name] for name in TAKEN])}
    for name, refused in TAKEN.items():
        row = rows[name]
        if case.name in refused:
            assert (row.reason, row.failed) == (refused[case.name], False)
        elif row.figures is None:
            assert row.reason.startswith("what backend='auto' takes"), row.reason
        else:
            assert len(row.figures.errors) == len(case.results)
            assert max(row.figures.errors) < 1e-6, name
            assert (row.figures.backward is None) == case.inference
            assert row.figures.host_us == ()
            assert row.figures.ms >= row.figures.forward.ms


def test_kernels_for_cuda_say_so():
    names = ("varlen", "flex", "xformers", "flash-attn")
    reasons = {
        (case, row.provider.name): (row.reason, row.failed)
        for case in ("smoke-packed", "smoke-bias")
        for row in attention_rows(BY_NAME[case], [PROVIDERS[name] for name in names])
    }
    assert reasons["smoke-bias", "varlen"] == ("it is for sequences of several lengths", False)
    for name in ("varlen", "xformers", "flash-attn"):
        assert reasons["smoke-packed", name] == ("its kernels need CUDA", False)
    assert reasons["smoke-packed", "flex"] == ("its backward needs CUDA", False)


def test_result_of_something_else_is_a_failure():
    """A rival that forgets the window, or the sinks, would be quick."""
    case = BY_NAME["smoke-softcap"]
    forgetful = AttentionProvider(
        "forgetful", "torch", lambda case: PROVIDERS["eager"].load(dataclasses.replace(case, window=None))
    )
    (row,) = attention_rows(case, [forgetful])
    assert row.failed
    assert row.reason.startswith("ArithmeticError: its ")
    assert "is not that of the definition" in row.reason


@pytest.mark.parametrize(
    ("name", "backend", "reason"),
    [
        ("smoke-decode", "sdpa", "torch's own kernels compute the same"),
        ("smoke-softcap", "torch", "not sdpa: it takes no soft cap"),
        ("smoke-sinks", "torch", "not sdpa: it gives no logsumexp"),
        ("smoke-packed-local", "torch", "not sdpa: it takes no window"),
        ("smoke-prefill", "torch", "not sdpa: it takes no mask but a causal one"),
        ("smoke-values", "torch", "not sdpa: it needs as many features of values as of keys"),
    ],
)
def test_rows_say_the_way_of_doctor(name, backend, reason):
    case = BY_NAME[name]
    (row,) = real_rows(case, [PROVIDERS["lowtide"]])
    assert row.engine == backend
    assert row.way.startswith(reason)
    assert own_choice(case, case.inputs(), "auto").reason == row.way


def test_half_precision_is_for_cards():
    assert {case.dtype for case in real_cases("cpu")} == {torch.float32}
    assert {case.dtype for case in real_cases("cuda")} == {torch.bfloat16, torch.float32}
    assert {case.device for case in real_cases("cuda")} == {"cuda"}


def test_ratios_are_to_the_quickest_of_torch(monkeypatch):
    """Torch's own choice takes 4 ms, another of its kernels 3, ours 2 + 4; eager's 1 counts not."""
    quick = AttentionProvider("sdpa-cudnn", "torch", PROVIDERS["sdpa"].load)
    providers = [PROVIDERS["lowtide"], PROVIDERS["sdpa"], quick, PROVIDERS["eager"]]
    times = (2.0, 4.0, 1.0, 3.0, 0.5, 2.5, 0.5, 0.5)  # forward and backward of each
    monkeypatch.setattr(
        attention, "alternate", lambda calls, rounds, device, together: [[time] * rounds for time in times]
    )
    rows = {row.provider.name: row for row in real_rows(BY_NAME["smoke-bias"], providers)}
    assert {row.best.provider.name for row in rows.values()} == {"sdpa-cudnn"}
    assert rows["lowtide"].ratios[:2] == (4.0, 1.6)
    assert rows["sdpa"].ratios[:2] == (2.0, 1.2)
    peaks = [rows[name].figures.peak_bytes for name in ("lowtide", "sdpa-cudnn")]
    assert rows["lowtide"].ratios[2] == peaks[0] / peaks[1]


def test_host_runs_ahead_on_cuda(monkeypatch):
    """Each round begins twice the host's time later on the card; each provider has two times.

    Calls of lowtide are recorded before.
    """
    pytest.importorskip("triton")
    from lowtide.core.recording.recorded import RECORDED_CALL_OF_LAYERS

    case = dataclasses.replace(BY_NAME["smoke-bias"], device="cuda")
    inputs = BY_NAME["smoke-bias"].inputs()
    leads, calls = [], []

    def attend(inputs):
        calls.append(inputs)
        return sum(leaf.sum() for leaf in inputs.leaves).expand_as(inputs.upstream)

    runners = [attention._Runner(PROVIDERS[name], attend, inputs) for name in ("lowtide", "sdpa")]

    def alternate(calls, rounds, device, lead_ms=0.0, together=1):
        leads.append(lead_ms)
        return [[1.0] * rounds for _ in calls]

    monkeypatch.setattr(attention, "alternate", alternate)
    monkeypatch.setattr(attention, "host_microseconds", lambda calls, rounds, warm: [10.0, 20.0, 30.0, 40.0])
    figures = attention._timed(case, runners, 300.0)
    assert [each.host_us for each in figures] == [(10.0, 20.0), (30.0, 40.0)]
    assert leads == [0.0, 0.2]
    assert len(calls) == attention.RECORDED > RECORDED_CALL_OF_LAYERS


def synthetic(case, name, forward, backward, peak, best=None, reason=""):
    figures = None
    if forward is not None:
        passes = [None if ms is None else Pass(ms, ms, ms, 1.0, None) for ms in (forward, backward)]
        errors = (1e-3, 2e-3)
        figures = AttentionFigures(*passes, None, peak, errors, (11.0, 22.0))
    engine = "triton" if name == "lowtide" else ""
    return RealRow(case, PROVIDERS[name], figures, engine, reason, False, "it is named", best)


def synthetic_rows():
    for case in ON_CPU:
        backward = None if case.inference else 6.0
        best = synthetic(case, "sdpa-cudnn", 2.0, backward, 4 << 20)
        yield dataclasses.replace(best, best=best)
        yield synthetic(case, "lowtide", 1.0, backward and backward / 2, 2 << 20, best)
        yield synthetic(case, "flex", 3.0, backward, 8 << 20, best)
        yield synthetic(case, "xformers", None, None, 0, best, "not taken: [sinks]")


def test_record_has_model_ratios_and_host():
    rows = list(synthetic_rows())
    fields = record(next(row for row in rows if row.provider.name == "lowtide"))
    assert set(fields) <= set(COLUMNS)
    assert (fields["model"], fields["source"]) == ("Swin-B", "microsoft/swin-base-patch4-window7-224")
    assert (fields["forward_over_torch"], fields["backward_over_torch"]) == ("0.5", "0.5")
    assert (fields["peak_over_torch"], fields["best_of_torch"]) == ("0.5", "sdpa-cudnn")
    assert (fields["forward_host_us"], fields["backward_host_us"]) == ("11", "22")
    assert (fields["engine"], fields["way"], fields["truth"]) == ("triton", "it is named", "float64")
    assert {"card", "torch", "lowtide", "command", "reason"} < set(COLUMNS)


def test_table_has_a_line_for_each_case():
    console = Console(width=REAL_ROWS.width, record=True, file=io.StringIO())
    console.print(REAL_ROWS.render(list(synthetic_rows())))
    text = console.export_text()
    for case in PUBLIC:
        (line,) = (line for line in text.splitlines() if line.startswith(f"  {case.name} "))
        assert case.sizes in line
        assert ("0.50*" if case.inference else "0.50 / 0.50*") in line
    assert "11 / 22 us" in text
    assert "xformers unavailable: not taken: [sinks] (swin-b, " in " ".join(text.split())


def test_providers_are_known():
    assert set(REAL_PROVIDERS) < set(PROVIDERS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", [case.name for case in SMOKE])
def test_rows_on_card(name):
    (case,) = (case for case in real_cases("cuda") if case.name == name)
    case = dataclasses.replace(case, dtype=torch.bfloat16)
    rows = {row.provider.name: row for row in real_rows(case, [PROVIDERS[name] for name in REAL_PROVIDERS])}
    own = rows["lowtide"].figures
    assert own is not None, rows["lowtide"].reason
    assert len(own.host_us) == (1 if case.inference else 2)
    assert all(us > 0 for us in own.host_us)
    assert not [row.reason for row in rows.values() if row.failed and "ArithmeticError" in row.reason]
