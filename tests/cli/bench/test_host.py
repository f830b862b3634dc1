from lowtide.tools.bench import host
from tests.support.commands import invoke, rows_of

OPERATORS = {
    "linear_cross_entropy",
    'linear_cross_entropy, reduction="none"',
    "linear_log_probs",
    "distillation.forward_kl",
    "chunked_loss",
    "memory_efficient_attention",
    "handed on",
    "windows with a bias",
}


def test_smoke_run_times_each_operator(tmp_path):
    out = tmp_path / "host.csv"
    done = invoke("bench", "host", "--smoke", "--device", "cpu", "--csv", out)
    assert done.exit_code == 0, done.output
    rows = rows_of(out)
    assert {row["operator"] for row in rows} == OPERATORS
    for row in rows:
        times = [float(value) for name, value in row.items() if name.endswith("_us")]
        assert len(times) == 4
        assert all(0 < each < 1e6 for each in times)
    assert "microseconds of the host" in done.output


def test_rows_are_written_as_they_come(tmp_path, monkeypatch):
    """A run that ends early keeps what it has measured."""
    out, measured, measure = tmp_path / "host.csv", [], host._row

    def stopped(*given):
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(measure(*given))
        return measured[-1]

    monkeypatch.setattr(host, "_row", stopped)
    done = invoke("bench", "host", "--smoke", "--device", "cpu", "--csv", out)
    assert done.exit_code != 0
    assert [row["operator"] for row in rows_of(out)] == [row.operator for row in measured]
    assert len(measured) == 2
