import dataclasses
import io

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

from lowtide.tools.bench import measure
from lowtide.tools.bench.cases import LossCase, Mode
from lowtide.tools.bench.heads.data import HEADS
from lowtide.tools.bench.heads.rows import HeadRow, counted_rows, head_cases, head_providers, head_rows
from lowtide.tools.bench.heads.table import COLUMNS, HEAD_ROWS, record
from lowtide.tools.bench.measure import Figures, aligned
from lowtide.tools.bench.providers import Provider, Unavailable
from lowtide.tools.bench.truth import exact, relative_error, truth_dtype
from lowtide.tools.doctor.linear_cross_entropy import AskedLossCall
from lowtide.tools.eager import eager_loss
from lowtide.tools.environment import Environment

PUBLIC = [head for head in HEADS if not head.smoke]
BY_NAME = {head.name: head for head in HEADS}
# Heads whose numbers are the defaults of a config class.
CLASSES = {
    "GPT-2": "gpt2",
    "BERT": "bert",
    "RoBERTa": "roberta",
    "ModernBERT": "modernbert",
    "BART-large": "bart",
    "T5-small": "t5",
    "Whisper-tiny": "whisper",
    "OPT-125M": "opt",
    "GPT-NeoX-20B": "gpt_neox",
    "Falcon-7B": "falcon",
    "Llama-2-7B": "llama",
    "Llama-4-Scout": "llama4_text",
    "Mistral-Small-3.1": "mistral3",
    "Phi-3-mini": "phi3",
    "Qwen3-8B": "qwen3",
    "Gemma-2-2B": "gemma2",
    "Command-R": "cohere",
    "DeepSeek-V3": "deepseek_v3",
    "gpt-oss-20b": "gpt_oss",
    "GLM-4-9B": "glm4",
}


def test_heads_are_many_and_say_where_from():
    assert len(PUBLIC) >= 50
    assert len(BY_NAME) == len(HEADS)
    assert len({(head.source, head.classes) for head in PUBLIC}) == len(PUBLIC)
    for head in PUBLIC:
        assert head.source.count("/") == 1
        assert head.checked in ("transformers", "litgpt", "maxtext", "config")
    assert {head.name for head in PUBLIC if head.checked == "transformers"} <= CLASSES.keys()


@pytest.mark.parametrize("name", CLASSES)
def test_heads_match_transformers(name):
    mapping = pytest.importorskip("transformers").CONFIG_MAPPING
    if CLASSES[name] not in mapping:
        pytest.skip(f"this transformers has no {CLASSES[name]}")
    config = mapping[CLASSES[name]]().get_text_config()
    head = BY_NAME[name]
    assert (config.hidden_size, config.vocab_size) == (head.features, head.classes)
    assert bool(config.tie_word_embeddings) is head.tied
    assert getattr(config, "final_logit_softcapping", None) == head.softcap


def case_of(name, tokens=24, **changes):
    (case,) = head_cases([BY_NAME[name]], [tokens], "cpu")
    return dataclasses.replace(case, **changes)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-14), (torch.bfloat16, 1e-13)])
def test_truth_with_soft_cap_is_that_of_autograd(dtype, tolerance):
    case = case_of("smoke-capped", dtype=dtype, softcap=0.5)
    input_ND, weight_VD, target_N = case.inputs(requires_grad=False)
    wide = [tensor.double().requires_grad_() for tensor in (input_ND, weight_VD)]
    loss = F.cross_entropy(0.5 * torch.tanh(F.linear(*wide) / 0.5), target_N)
    want = (loss.detach(), *torch.autograd.grad(loss, wide))
    for one, other in zip(exact(input_ND, weight_VD, target_N, Mode.STEP, 0.5), want, strict=True):
        assert one.dtype == torch.float64
        assert relative_error(one, other) < tolerance


def test_truth_is_float64_where_affordable():
    assert truth_dtype(4096, 4096, 128_256, torch.bfloat16) is torch.float64
    assert truth_dtype(65_536, 8192, 128_256, torch.bfloat16) is torch.float32
    assert truth_dtype(256, 14_336, 250_880, torch.bfloat16) is torch.float32, "57 GB"
    assert truth_dtype(65_536, 8192, 128_256, torch.float32) is torch.float64


def test_aligned_operands_give_the_same_logits_and_zeros():
    inputs = case_of("smoke-odd").inputs(requires_grad=True)
    input_ND, weight_VD, target_N = aligned(*inputs)
    assert (input_ND.shape, weight_VD.shape) == ((24, 64), (1008, 64))
    assert target_N is inputs[2]
    logits_NV = F.linear(input_ND, weight_VD)
    torch.testing.assert_close(logits_NV[:, :1003], F.linear(*inputs[:2]).detach())
    assert not logits_NV[:, 1003:].any()


@pytest.mark.parametrize(("name", "floors"), [("smoke-odd", 2), ("smoke-capped", 1)])
def test_both_floors_take_their_turn(name, floors, monkeypatch):
    sizes = []
    products = measure.floor

    def floor(input_ND, weight_VD, *rest):
        run = products(input_ND, weight_VD, *rest)
        return lambda: (sizes.append((*input_ND.shape, len(weight_VD))), run())

    monkeypatch.setattr(measure, "floor", floor)
    case = case_of(name)
    eager = next(each for each in head_providers([None]) if each.name == "eager")
    (row,) = head_rows(case, [eager])
    assert row.engine == ""
    as_they_are, rounded_up = (24, case.features, case.classes), (24, 64, -(-case.classes // 8) * 8)
    turns = list(zip(*[iter(sizes)] * floors, strict=True))
    assert all(set(turn) == {as_they_are, rounded_up} for turn in turns)
    figures = row.figures
    if floors == 1:
        assert (figures.aligned_floor_ms, figures.aligned_ratio) == (figures.floor_ms, figures.ratio)
    assert max(figures.errors) < 1e-6


def test_soft_cap_reaches_every_provider():
    """Those without one say so; without the cap the loss would be another."""
    case = case_of("smoke-capped", softcap=0.1)
    inputs = case.inputs(requires_grad=True)
    want, *_ = exact(*inputs, Mode.STEP, 0.1)
    plain = eager_loss(*inputs)
    assert abs(plain - want) > 0.1
    refused = set()
    for provider in head_providers([None, 1 << 20]):
        if provider.name == "compile":
            continue
        try:
            (loss,) = provider.call(case, inputs).run()
        except Unavailable as reason:
            refused.add((provider.name, str(reason)))
        else:
            assert abs(loss - want) < 1e-5
    assert ("torch-chunked", "it has no soft cap") in refused or not hasattr(
        torch.nn, "LinearCrossEntropyOptions"
    )


def test_workspaces_are_names():
    names = [provider.name for provider in head_providers([None, 256 << 20, 1 << 30, 1000])]
    assert names[:4] == ["lowtide", "lowtide-256MiB", "lowtide-1GiB", "lowtide-1000B"]
    assert {"eager", "compile", "liger", "cut-cross-entropy", "quack"} < set(names)
    assert sum(name.startswith("lowtide") for name in names) == 4


def test_rows_name_the_way_of_doctor():
    case = case_of("smoke-odd")
    (row,) = head_rows(case, head_providers([1 << 16])[:1])
    found = AskedLossCall(24, 60, 1003, dtype=torch.float32, workspace=1 << 16).describe()
    assert (row.engine, row.chunks) == (found["engine"], found["rows"])
    assert row.engine == "logits_torch"


def test_workspace_too_small_is_a_row():
    (row,) = head_rows(case_of("smoke-odd"), head_providers([100])[:1])
    assert row.failed
    assert row.reason.startswith("ArgumentError: workspace must hold one row")
    assert row.engine == ""


def synthetic(case: LossCase, name: str, ratio: float | None, reason: str = "") -> HeadRow:
    provider = Provider(name, "torch", lambda case: None)
    figures = None
    if ratio is not None:
        errors = (1e-7, 1e-3, 2e-3)
        figures = Figures(2 * ratio, ratio, ratio, 4.0, ratio / 2, 3 << 29, errors, 2.0, ratio)
    return HeadRow(case, Mode.STEP, provider, figures, reason, engine="exponentials" * (name == "lowtide"))


ROWS = [
    synthetic(case, name, ratio, reason)
    for case in head_cases(PUBLIC, (256, 4096), "cpu")
    for name, ratio, reason in (
        ("lowtide", 1.03, ""),
        ("lowtide-256MiB", 1.4, ""),
        ("eager", 1.9, ""),
        ("compile", 1.02 if case.classes % 8 else 1.2, ""),
        ("quack", None, "it has no [soft] cap"),
    )
]


def test_table_has_ratios_of_all_and_marks_the_best():
    console = Console(width=HEAD_ROWS.width, record=True, file=io.StringIO())
    console.print(HEAD_ROWS.render(ROWS))
    text = console.export_text()
    lines = [line for line in text.splitlines() if " x " in line and "exponentials" in line]
    assert len(lines) == 2 * len(PUBLIC)
    of_gpt2, of_llama = (
        next(line.split() for line in lines if f" {name} " in line) for name in ("GPT-2", "Llama-3-8B")
    )
    times = ["1.03", "2.06", "ms", "1.40", "2.8", "ms", "1.90", "3.8", "ms"]
    sizes = ["GPT-2", "768", "x", "50257", "256"]
    assert of_gpt2 == [*sizes, "2", "exponentials", *times, "1.02*", "2.04", "ms"]
    assert of_llama[7:9] == ["1.03*", "2.06"]
    assert of_llama[-3:] == ["1.20", "2.4", "ms"]
    assert "1.5 GiB 2e-03" in text
    assert "quack unavailable: it has no [soft] cap (GPT-2-256, " in " ".join(text.split())


HERE = Environment("2026-01-01", "SYNTHETIC", "2.11.0", "3.6.0", "0123456789ab", "", "lowtide bench heads")


def test_record_has_head_floors_and_command():
    fields = dataclasses.asdict(HERE) | record(ROWS[0])
    assert set(fields) <= set(COLUMNS)
    assert (fields["head"], fields["features"], fields["classes"]) == ("GPT-2", 768, 50257)
    assert (fields["tied"], fields["softcap"], fields["source"]) == (True, None, "openai-community/gpt2")
    assert (fields["aligned_floor_ms"], fields["aligned_ratio"], fields["floor_ms"]) == ("2", "1.03", "4")
    assert (fields["engine"], fields["truth"]) == ("exponentials", "float64")
    assert fields["command"] == "lowtide bench heads"
    assert {"card", "torch", "lowtide", "version"} < set(COLUMNS)
    assert len(COLUMNS) == len(set(COLUMNS))


def test_share_of_ignored_tokens_beside_the_others_alone():
    """The plain call is the same loss, on the tokens that count."""
    (case,) = head_cases([BY_NAME["smoke-odd"]], [40], "cpu", 0.75)
    assert case.name == "smoke-odd-40-ignored-75"
    inputs = case.inputs(requires_grad=True)
    assert (inputs[2] == -100).sum() == 30
    (whole,) = head_providers([None])[0].call(case, inputs).run()
    alone = counted_rows().call(case, inputs)
    (found,) = alone.run()
    torch.testing.assert_close(found, whole, rtol=1e-6, atol=0)
    assert [tuple(leaf.shape) for leaf in alone.leaves] == [(10, 60), (1003, 60)]
    (row,) = head_rows(dataclasses.replace(case, smoke=True), head_providers([None])[:1], counted_rows())
    assert row.figures.plain_ms > 0
    assert record(row)["ignored"] == "0.75"
    console = Console(width=HEAD_ROWS.width, record=True, file=io.StringIO())
    console.print(HEAD_ROWS.render([row]))
    assert f"{1 + row.figures.over_plain:.2f} of counted" in console.export_text()
