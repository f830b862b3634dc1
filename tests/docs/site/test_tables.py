"""The tables of the built site say what the CSVs and the code say."""

import csv
import re
from html.parser import HTMLParser

import pytest
import torch

from tests.docs.snippets import DOCS, ROOT

pytestmark = pytest.mark.extended  # building it takes seconds, in a process of its own
PERFORMANCE = sorted({page.stem for page in (DOCS / "performance").glob("*.md")} - {"index"})
VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "wbr"}


class Tables(HTMLParser):
    """The cells of each table of the class `benchmark`, as text and link; each id's text."""

    def __init__(self, page):
        super().__init__()
        self.tables, self.texts, self._open, self._cell = [], {}, [], None
        self.feed(page.read_text())

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        if tag == "table" and "benchmark" in (found.get("class") or ""):
            self.tables.append([])
        if tag == "tr" and self.tables:
            self.tables[-1].append([])
        if tag in ("td", "th") and self.tables:
            self._cell = ["", None]
            self.tables[-1][-1].append(self._cell)
        if tag == "a" and self._cell:
            self._cell[1] = found["href"]
        if tag not in VOID:
            self._open.append((tag, found.get("id")))
            if found.get("id"):
                self.texts[found["id"]] = ""

    def handle_endtag(self, tag):
        while self._open and self._open.pop()[0] != tag:
            pass
        if tag in ("td", "th"):
            self._cell = None

    def handle_data(self, data):
        if self._cell:
            self._cell[0] += data.strip()
        for _, name in self._open:
            if name:
                self.texts[name] += data


def test_benchmark_table_has_the_numbers_of_the_csv(site):
    page = Tables(site / "performance" / "h200.html")
    with (ROOT / "benchmarks/h200/linear_cross_entropy_step.csv").open() as lines:
        rows = {(row["case"], row["provider"]): row for row in csv.DictReader(lines)}
    compared = 0
    for case, (heading, *body) in zip("ABCD", page.tables):
        assert [text for text, _ in heading][:3] == ["", "ms", "ratio"]
        for (provider, _), (ms, _), (ratio, _), (peak, _), *errors in body:
            row = rows[case, provider]
            assert float(ms) == pytest.approx(float(row["ms"]), abs=0.051)
            assert float(ratio) == pytest.approx(float(row["ratio"]), abs=0.0051)
            assert int(peak.replace(",", "")) == pytest.approx(int(row["peak_bytes"]) / 2**20, abs=0.51)
            fields = ("loss_error", "grad_input_error", "grad_weight_error")
            for (error, _), field in zip(errors, fields):
                assert float(error) == pytest.approx(float(row[field]), rel=0.06)
            compared += 1
    assert compared == 44


BEFORE_THE_COMMAND = r"\s*(OMP_NUM_THREADS=1 |torchrun \S+ -m )?"
RUN = BEFORE_THE_COMMAND + r"lowtide (bench|estimate) .* · commit [0-9a-f]{7} · .*torch \d"


@pytest.mark.parametrize("name", PERFORMANCE)
def test_each_number_links_command_and_commit(site, name):
    page = Tables(site / "performance" / f"{name}.html")
    links = [link for table in page.tables for row in table[1:] for text, link in row if link]
    assert len(links) > 5
    for link in links:
        text = page.texts[link.removeprefix("#")]
        assert re.match(RUN, text), text
        assert (ROOT / re.search(r"benchmarks/\S+\.csv", text)[0]).exists()


def test_ways_are_those_of_the_code(site):
    """The table has the ways of calls that are described anew here, on this machine."""
    from lowtide.tools.doctor.attention import table
    from lowtide.tools.doctor.linear_cross_entropy import AskedLossCall

    text = re.sub(r"<[^>]+>", " ", (site / "reference" / "ways.html").read_text())
    text = " ".join(text.split()).replace("&amp;", "&")
    for call, cpu, cuda in table():
        assert f"{call} {cpu} {cuda}" in text
    line = re.search(r" float32 (\w+) (\w+) (\w+) (\w+) float64 ", text)
    assert line[4] == AskedLossCall(8192, 4096, 128_256, dtype=torch.float32).plan().engine
    line = re.search(r"class indices (\w+) (\w+) (\w+) (\w+) the same", text)
    assert line.groups() == ("exponentials", "logits_triton", "cpu_exponentials", "logits_torch")
