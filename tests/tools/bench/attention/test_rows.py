"""`lowtide bench attention`: its providers and rows."""

import pytest
import torch

from lowtide.tools.bench.attention import rows as attention
from lowtide.tools.bench.attention.cases import (
    ATTENTION_CASES,
    BY_HEAD_AND_KEY,
    BY_QUERY_AND_KEY,
    AttentionCase,
)
from lowtide.tools.bench.attention.providers import ATTENTION_PROVIDERS, AttentionProvider
from lowtide.tools.bench.attention.rows import attention_rows
from lowtide.tools.bench.providers import Unavailable
from tests.support.extended import all_extended_but

SMALL = {"dtype": torch.float32, "device": "cpu"}
CASES = (
    AttentionCase("causal, shared heads", 2, 6, 33, 8, G=2, causal=True, **SMALL),
    AttentionCase("bias of scores", 2, 3, 33, 8, bias=BY_QUERY_AND_KEY, **SMALL),
    AttentionCase("bias of keys", 2, 3, 33, 8, bias=BY_HEAD_AND_KEY, **SMALL),
    AttentionCase("both", 1, 2, 17, 4, bias=BY_QUERY_AND_KEY, causal=True, **SMALL),
)
EAGER = next(provider for provider in ATTENTION_PROVIDERS if provider.name == "eager")


@pytest.mark.parametrize("case", all_extended_but([CASES[2]], CASES), ids=lambda case: case.name)
def test_providers_agree(case):
    rows = list(attention_rows(case, ATTENTION_PROVIDERS))
    ran = {row.provider.name: row.figures for row in rows if row.figures}
    assert {"lowtide", "eager", "sdpa"} <= ran.keys()
    eager = ran["eager"].errors
    assert len(eager) == (5 if case.bias else 4)
    for name, figures in ran.items():
        assert max(figures.errors) <= 2 * max(eager) + torch.finfo(torch.float32).eps, name
        assert figures.peak_bytes >= 0
    assert not [row.reason for row in rows if row.failed and row.provider.name.startswith("lowtide")]


def test_rows_name_backend():
    cases = {case.name: case for case in CASES}
    engines = {}
    for name in ("causal, shared heads", "bias of keys"):
        for row in attention_rows(cases[name], ATTENTION_PROVIDERS[:3]):
            engines[name, row.provider.name] = row.engine or row.reason
    assert engines["causal, shared heads", "lowtide"] == "sdpa"
    assert engines["causal, shared heads", "lowtide-torch"] == "torch"
    assert engines["bias of keys", "lowtide"] == "torch"
    assert "row of its own" in engines["bias of keys", "lowtide-torch"], "not measured twice"


def test_rates_and_ratios(monkeypatch):
    """Two peers and one of ours, of given times."""
    ours = AttentionProvider("ours", "lowtide", EAGER.load, "torch")
    case = AttentionCase("plain", 1, 2, 16, 8, **SMALL)
    times = (2.0, 8.0, 1.0, 9.0, 4.0, 4.0)  # forward and backward of each
    monkeypatch.setattr(
        attention, "alternate", lambda calls, rounds, device, together: [[time] * rounds for time in times]
    )
    first, second, third = attention_rows(case, (ours, EAGER, EAGER))
    flops = 4 * 2 * 16 * 16 * 8
    assert first.figures.forward.tflops == pytest.approx(flops / 2e-3 / 1e12)
    assert first.figures.backward.tflops == pytest.approx(2.5 * flops / 8e-3 / 1e12)
    assert (first.figures.forward.ratio, first.figures.backward.ratio) == (0.5, 0.5)
    assert first.figures.step_ratio == pytest.approx(8 / 10), "of the fastest step, not the fastest passes"
    assert (second.figures.forward.ratio, third.figures.step_ratio) == (1.0, 1.0)


def test_failure_row():
    def broken(case):
        raise RuntimeError("out of luck\nand more")

    def refused(case):
        raise Unavailable("not today")

    def infinite(case):
        return lambda inputs: inputs.query / 0

    providers = [AttentionProvider(load.__name__, "torch", load) for load in (broken, refused, infinite)]
    rows = {row.provider.name: row for row in attention_rows(CASES[0], [*providers, EAGER])}
    assert (rows["broken"].reason, rows["broken"].failed) == ("RuntimeError: out of luck", True)
    assert (rows["refused"].reason, rows["refused"].failed) == ("not today", False)
    assert rows["infinite"].failed
    assert rows["eager"].figures is not None


def test_precision_setting_not_changed():
    seen = []

    def watched(case):
        seen.append(torch.get_float32_matmul_precision())
        return EAGER.load(case)

    case = AttentionCase("tf32", 1, 2, 16, 8, tf32=True, **SMALL)
    before = torch.get_float32_matmul_precision()
    list(attention_rows(case, [AttentionProvider("watched", "torch", watched)]))
    assert seen == ["high"]
    assert torch.get_float32_matmul_precision() == before


def test_cases_named_and_counted():
    names = [case.name for case in ATTENTION_CASES]
    assert len(set(names)) == len(names)
    of = {case.name: case for case in ATTENTION_CASES}
    assert of["plain-64"].forward_flops == 4 * 4 * 16 * 4096**2 * 64
    assert of["causal-128"].forward_flops == 4 * 16 * 16384**2 * 128 / 2
    assert of["bias-keys"].bias_shape == (4, 1, 1, 2048)
    assert "bias [4, 1, 1, 2048]" in of["bias-keys"].shape
    assert "H 16/4" in of["causal-512-gqa"].shape


def test_case_too_large_row_per_provider():
    case = AttentionCase("far too long", 1 << 20, 1 << 10, 1 << 20, 8, **SMALL)
    rows = list(attention_rows(case, ATTENTION_PROVIDERS))
    assert [row.provider.name for row in rows] == [provider.name for provider in ATTENTION_PROVIDERS]
    assert all(row.failed for row in rows)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
# Dynamo gives this warning, as it looks at every attribute of flex attention's operands. As an
# error it would end Dynamo.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("name", ["smoke-cuda", "smoke-cuda-bias", "smoke-cuda-dropout"])
def test_providers_on_card(name):
    (case,) = (case for case in ATTENTION_CASES if case.name == name)
    rows = {row.provider.name: row for row in attention_rows(case, ATTENTION_PROVIDERS)}
    assert not [row.reason for row in rows.values() if row.failed and row.provider.backend]
    assert rows["flex"].figures is not None or case.dropout, rows["flex"].reason
    ran = {name: row.figures for name, row in rows.items() if row.figures}
    assert {"lowtide", "sdpa", "eager"} <= ran.keys()
    assert {"lowtide", "lowtide-triton"} & {name for name, row in rows.items() if row.engine == "triton"}
    eager = ran["eager"].errors
    for name, figures in ran.items():
        assert all(error <= 2 * max(eager) for error in figures.errors), name
