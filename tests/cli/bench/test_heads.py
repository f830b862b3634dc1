import pytest

from tests.support.commands import invoke, rows_of, said


@pytest.mark.extended
def test_smoke_run_writes_table_csv_and_picture(tmp_path):
    out, picture = tmp_path / "heads.csv", tmp_path / "heads.svg"
    arguments = ("--tokens", "40,96", "--workspaces", "default,64KiB", "--csv", out, "--plot", picture)
    done = invoke("bench", "heads", "--smoke", "--device", "cpu", *arguments)
    assert done.exit_code == 0, done.output
    rows = rows_of(out)
    ours = [row for row in rows if row["provider"].startswith("lowtide")]
    assert [(row["head"], row["tokens"], row["workspace"]) for row in ours] == [
        (head, tokens, workspace)
        for head in ("smoke-odd", "smoke-capped")
        for tokens in ("40", "96")
        for workspace in ("", "65536")
    ]
    for row in rows:
        assert row["lowtide"]
        assert row["torch"]
        if row["status"] == "ok":
            assert float(row["aligned_ratio"]) > 0
            assert max(float(row[f"{name}_error"]) for name in ("loss", "grad_input", "grad_weight")) < 2e-6
    assert {row["provider"] for row in rows if row["status"] == "ok"} >= {"eager", "compile-aot-eager"}
    assert {row["engine"] for row in ours} == {"logits_torch"}
    assert "ratio to the aligned floor" in done.output
    assert "cut-cross-entropy unavailable: its kernels need CUDA" in said(done)
    assert "<svg" in picture.read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--heads", "GPT-5"), "'GPT-5' is not one of GPT-2, "),
        (("--tokens", "0"), "'0' must be numbers from 1 to "),
        (("--tokens", "256,many"), "'256,many' must be numbers from 1 to "),
        (("--workspaces", "default,much"), "'much' must be a number of bytes"),
    ],
)
def test_options_refused_before_the_work(arguments, words):
    done = invoke("bench", "heads", "--device", "cpu", *arguments)
    assert done.exit_code == 2
    assert words in said(done)
