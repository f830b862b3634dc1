"""Tables and summaries of benchmarks/h200/heads.csv and attention_real.csv say what rows say."""

import csv

import pytest

from tests.docs.snippets import DOCS

pytest.importorskip("sphinx")

RUN = {"date": "2026-01-01", "card": "SYNTHETIC", "torch": "2.11.0", "triton": "3.6.0", "lowtide": "0123456"}
RUN |= {"command": "lowtide bench", "status": "ok"}


@pytest.fixture
def extensions(monkeypatch, tmp_path):
    """Return the two modules, which read their CSVs below tmp_path."""
    monkeypatch.syspath_prepend(str(DOCS / "_extensions"))
    import benchmark_records
    import benchmark_summaries
    import benchmark_tables

    monkeypatch.setattr(benchmark_records, "BENCHMARKS", tmp_path)
    return benchmark_summaries, benchmark_tables


def write(path, rows):
    path.parent.mkdir(exist_ok=True)
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*RUN, *names], restval="")
        writer.writeheader()
        writer.writerows(RUN | row for row in rows)


def head(name, tokens, features, provider, ratio, peak=1 << 31, predicted="", **more):
    sizes = {"head": name, "case": f"{name}-{tokens}", "tokens": tokens, "features": features}
    sizes |= {"classes": 1000, "provider": provider, "aligned_ratio": ratio, "peak_bytes": peak}
    return sizes | {"predicted_ratio": predicted, "aligned_floor_ms": 2.0, "floor_ms": 3.0} | more


HEADS = [
    head("Llama-3-8B", 256, 4096, "lowtide", 1.3, predicted=1.3),
    head("A", 4096, 4096, "lowtide", 1.05, 3 << 30, predicted=1.155),
    head("A", 4096, 4096, "compile", 1.0),
    head("A", 4096, 4096, "eager", 1.9),
    head("A", 4096, 4096, "lowtide-256MiB", 1.6),
    head("B", 4096, 1024, "lowtide", 1.14, 1 << 20),
    head("B", 4096, 1024, "compile", 1.2, 1 << 20),
    head("B", 4096, 1024, "lowtide-256MiB", 1.4),
    head("C", 4096, 64, "lowtide", 3.0),
    head("C", 4096, 64, "compile", 1.0),
    head("D", 4096, 2048, "lowtide", 9.0, status="failed"),
]


def lines_of(table):
    return {
        cells[0]: cells[1:]
        for line in table.splitlines()
        if line.startswith("| ")
        for cells in [line.removeprefix("| ").removesuffix(" |").split(" | ")]
    }


def test_summary_of_heads(extensions, tmp_path):
    summaries, _ = extensions
    assert summaries.heads_summary() == "Not measured yet."
    write(tmp_path / "h200" / "heads.csv", HEADS)
    found = lines_of(summaries.heads_summary())
    over = found["default over the quickest of the others (N ≥ 2048, D ≥ 768)"]
    assert over == ["1.02", "1 of 2", "1.00", "1.05", "A-4096"]
    memory = found["its memory over that of the quickest, where that is above 1 GiB"]
    assert memory == ["1.00", "0 of 1", "1.50", "1.50", "A-4096"]
    assert found["default over the aligned floor (N ≥ 2048, D ≥ 2048)"][1:] == [
        "1 of 1",
        "1.05",
        "1.05",
        "A-4096",
    ]
    assert found["the same (N ≥ 2048, D from 768 to 2047)"][1:] == ["1 of 1", "1.14", "1.14", "B-4096"]
    small = found["256 MiB over the aligned floor (N ≥ 2048, D ≥ 1024)"]
    assert small == ["1.55", "1 of 2", "1.50", "1.60", "A-4096"]
    few = found["default over the floor (N 256, D 4096, V 128256)"]
    assert few == ["1.35", "1 of 1", "1.30", "1.30", "Llama-3-8B-256"]
    predicted = found["distance of the prediction from the ratio"]
    assert predicted == ["0.05", "1 of 2", "0.05", "0.10", "A-4096, lowtide"]


def test_best_of_a_line_is_bold(extensions, tmp_path):
    _, tables = extensions
    write(tmp_path / "h200" / "heads.csv", HEADS)
    options = {"columns": "head, aligned floor, aligned ratio", "across": "provider", "command": "x"}
    options |= {"where": "tokens=4096 status=ok", "absent": "no rows"}
    found = lines_of(tables.markdown("h200/heads.csv", options))
    assert found["head"] == ["aligned floor, ms", "lowtide", "compile", "eager", "lowtide-256MiB"]
    assert found["A"] == ["2.00", "1.05", "1.00", "1.90", "1.60"]
    found = lines_of(tables.markdown("h200/heads.csv", options | {"best": "lowest"}))
    assert found["A"] == ["2.00", "1.05", "**1.00**", "1.90", "1.60"]
    assert found["B"] == ["2.00", "**1.14**", "1.20", "–", "1.40"]
    assert tables.markdown("h200/heads.csv", options | {"where": "tokens=7"}) == "no rows"


def attention(case, provider, forward, backward, over, best="sdpa-cudnn", engine="", queries=4096, **more):
    row = {"case": case, "provider": provider, "forward_ms": forward, "backward_ms": backward}
    row |= dict(zip(("forward_over_torch", "backward_over_torch", "peak_over_torch"), over))
    row |= {"best_of_torch": best, "engine": engine, "queries": queries, "grad_bias_error": ""}
    return row | {"forward_host_us": 10.0, "backward_host_us": 20.0} | more


ATTENTION = [
    attention("swin", "lowtide", 1.0, 4.0, (0.5, 1.2, 0.9), queries=49, grad_bias_error=1e-3),
    attention("swin", "sdpa-cudnn", 2.0, 3.0, (1, 1, 1)),
    attention("swin", "sdpa", 2.5, 3.5, (1.25, 1.16, 1)),
    attention("swin", "flex", 0.8, 8.0, (0.4, 2.6, 2)),
    attention("plain", "lowtide", 1.0, 1.0, (1.0, 1.01, 1.0), engine="sdpa", backward_host_us=25.0),
    attention("plain", "sdpa-cudnn", 1.0, 0.99, (1, 1, 1)),
    attention("plain", "sdpa", 1.0, 1.0, (1, 1, 1)),
    attention("capped", "lowtide", 1.0, "", ("", "", ""), best=""),
]


def test_summary_of_attention(extensions, tmp_path):
    summaries, _ = extensions
    assert summaries.attention_summary() == "Not measured yet."
    write(tmp_path / "h200" / "attention_real.csv", ATTENTION)
    found = lines_of(summaries.attention_summary())
    assert found["time over torch's quickest"] == ["1.05", "3 of 4", "1.00", "1.20", "swin, backward"]
    assert found["the same, with a bias that takes a gradient, M ≥ 256"] == ["0.75", "0", "–", "–", ""]
    assert found["the same, M < 256"] == ["1.00", "1 of 2", "0.85", "1.20", "swin, backward"]
    assert found["the same, handed on to torch"] == ["1.03", "2 of 2", "1.00", "1.01", "plain, backward"]
    assert found["memory over torch's quickest"] == ["1.00", "2 of 2", "0.95", "1.00", "plain"]
    assert found["time over FlexAttention, compiled"] == ["1.00", "1 of 2", "0.88", "1.25", "swin, forward"]


def test_torch_is_its_quickest_kernel(extensions, tmp_path):
    _, tables = extensions
    write(tmp_path / "h200" / "attention_real.csv", ATTENTION)
    options = {"columns": "case, both ms", "across": "side", "best": "lowest", "command": "x"}
    found = lines_of(tables.markdown("h200/attention_real.csv", options))
    assert found["case"] == ["lowtide", "torch", "flex"]
    assert found["swin"] == ["**1.00 / 4.00**", "**2.00 / 3.00**", "0.80 / 8.00"]
    assert found["plain"] == ["1.00 / 1.00", "**1.00 / 0.99**", "–"]
    assert found["capped"] == ["**1.00**", "–", "–"]
