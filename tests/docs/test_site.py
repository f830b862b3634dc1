"""The built site: no warning, no dead link, tables that say what the CSVs and the code say, and in
a browser every page, a formula, and the search."""

import csv
import os
import re
import subprocess
import sys
import urllib.request
from html.parser import HTMLParser

import pytest
import torch

from tests.docs import browser
from tests.docs.snippets import DOCS, ROOT

pytestmark = pytest.mark.extended  # building it takes seconds, in a process of its own
MODULES = ("attn_bias", "distillation", "losses")
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


def test_site_builds_without_warning(built):
    _, log = built
    assert log == "0\n"


def test_tables_in_the_files_are_in_date():
    """Those that readers of the files see are what the site's directives make."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, DOCS / "_extensions" / "page_tables.py", "--check"],
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_tables_out_of_date_are_named(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS / "_extensions"))
    pytest.importorskip("sphinx")
    import page_tables

    (tmp_path / "page.md").write_text("<!-- {ways-of-attention} -->\n\nold\n\n<!-- end -->\n")
    monkeypatch.setattr(page_tables, "DOCS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["page_tables.py", "--check"])
    with pytest.raises(SystemExit, match=r"make tables would change page\.md"):
        page_tables.main()
    monkeypatch.setattr(sys, "argv", ["page_tables.py"])
    page_tables.main()
    assert "| call | on the CPU | on CUDA |" in (tmp_path / "page.md").read_text()


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


def test_tables_of_performance_are_made_from_csvs(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS / "_extensions"))
    pytest.importorskip("sphinx")
    import page_tables

    for page in (DOCS / "performance").glob("*.md"):
        by_hand = page_tables.BLOCK.sub("", page.read_text())
        assert not re.search(r"^\|[ :|-]+\|$", by_hand, flags=re.MULTILINE), page


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
    """Of calls that are described anew here, on this machine."""
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


def test_command_line_has_every_command(site):
    text = (site / "reference" / "command_line.html").read_text()
    for name in ("estimate", "profile", "train", "bench-attention", "doctor-linear-cross-entropy"):
        assert f'id="lowtide-{name}"' in text
    assert "--workspace" in text


def test_contract_has_formulas_and_arguments(site):
    text = (site / "reference" / "loss.html").read_text()
    assert '<math xmlns="http://www.w3.org/1998/Math/MathML" display="block">' in text
    assert "lowtide.linear_cross_entropy" in text
    assert re.search(r"<dt><code[^>]*><span[^>]*>row_weight</span></code></dt>", text), (
        "an argument is an entry of a list"
    )


def test_formulas_are_read_whole(site):
    """Neither a command nor an alignment is left in one as it was typed."""
    for page in site.rglob("*.html"):
        assert not re.findall(r"<m[io]>(?:\\|&)(?:amp;)?(?:\w+)?</m[io]>", page.read_text()), page


def test_reference_has_every_public_name(site):
    import lowtide

    text = "".join(page.read_text() for page in (site / "reference").glob("*.html"))
    there = set(re.findall(r'<dt class="sig [^>]*id="([\w.]+)"', text))
    names = {f"lowtide.{name}" for name in lowtide.__all__} - {"lowtide." + name for name in MODULES}
    for module in MODULES:
        names |= {f"lowtide.{module}.{name}" for name in getattr(lowtide, module).__all__}
    found = {name.rpartition(".")[2] for name in there}
    assert {name.rpartition(".")[2] for name in names} <= found


def test_pages_need_no_network(site):
    for page in site.rglob("*.html"):
        fetched = re.findall(
            r'<(?:script|img)[^>]* src="([^"]+)"|<link[^>]* href="([^"]+)"', page.read_text()
        )
        assert not [each for pair in fetched for each in pair if each.startswith(("http:", "https:", "//"))]


needs_browser = pytest.mark.skipif(browser.why_none() is not None, reason=str(browser.why_none()))


@needs_browser
def test_browser_follows_every_link(site):
    """From the first page to every page, and to every place on one that a link names."""
    with browser.served(site) as address, browser.started() as driver:
        ahead, ids, linked, files = [f"{address}/index.html"], {}, set(), set()
        while ahead:
            page = ahead.pop()
            if page in ids:
                continue
            driver.get(page)
            assert "Error response" not in driver.title, page
            ids[page] = set(
                driver.execute_script("return [...document.querySelectorAll('[id]')].map(e => e.id)")
            )
            for link in driver.execute_script(
                "return [...document.querySelectorAll('a[href]')].map(e => e.href)"
            ):
                target, _, place = link.partition("#")
                if not target.startswith(address):
                    continue
                if target.endswith(".html"):
                    ahead.append(target)
                    linked.add((target, place))
                elif not target.endswith("/"):
                    files.add(target)
        dead = [link for link in linked if link[1] and link[1] not in ids[link[0]]]
        assert not dead
        for file in files:
            assert urllib.request.urlopen(file).status == 200
    there = {
        page.relative_to(site).as_posix() for page in site.rglob("*.html") if "_static" not in page.parts
    }
    reached = {page.removeprefix(f"{address}/") for page in ids}
    assert there - reached <= {"search.html", "genindex.html", "py-modindex.html"}
    assert len(reached) > 100


@needs_browser
def test_browser_renders_a_formula(site):
    """A numerator stands above its denominator."""
    script = """
        const fraction = document.querySelector('math mfrac');
        return [...fraction.children].map(e => { const b = e.getBoundingClientRect();
                                                 return [b.top, b.bottom, b.width]; });
    """
    with browser.served(site) as address, browser.started() as driver:
        driver.get(f"{address}/explanation/attention.html")
        (_, bottom, width), (top, _, other) = driver.execute_script(script)
    assert min(width, other) > 3
    assert bottom <= top + 1


@needs_browser
def test_browser_finds_workspace_by_search(site):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    with browser.served(site) as address, browser.started() as driver:
        driver.get(f"{address}/search.html?q=workspace")
        here = (By.CSS_SELECTOR, "#search-results li a[href*='howto/workspace.html']")
        WebDriverWait(driver, 60).until(lambda driver: driver.find_elements(*here))
        driver.find_element(*here).click()
        WebDriverWait(driver, 60).until(lambda driver: "Choosing a workspace" in driver.title)


@needs_browser
def test_browser_search_puts_tasks_before_records(site):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    first = {"slow": "reference/ways", "out of memory": "start/memory", "chunk loop": "migrate/chunk_loop"}
    with browser.served(site) as address, browser.started() as driver:
        for query, page in first.items():
            driver.get(f"{address}/search.html?q={query.replace(' ', '+')}")
            summary = (By.CSS_SELECTOR, ".search-summary")
            WebDriverWait(driver, 60).until(
                lambda driver, summary=summary: "finished" in driver.find_element(*summary).text
            )
            links = driver.find_elements(By.CSS_SELECTOR, "#search-results li > a")
            found = [
                link.get_attribute("href").removeprefix(f"{address}/").partition(".")[0] for link in links
            ]
            assert page in found[:3], (query, found)
            records = [place for place, name in enumerate(found) if name.startswith("decisions/")]
            assert records == [*range(len(found) - len(records), len(found))], (query, found)


@needs_browser
@pytest.mark.parametrize("width", [390, 1280])
def test_browser_pages_fit_their_width(site, width):
    """Wide tables, formulas and code scroll by themselves."""
    names = ["index", "install", "howto/workspace", "reference/loss", "reference/ways", "reference/models"]
    names += ["explanation/attention", "performance/h200", "performance/attention", "examples/index"]
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    with browser.served(site) as address, browser.started() as driver:
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        for name in names:
            assert (DOCS / f"{name}.md").exists()
            driver.get(f"{address}/{name}.html")
            beyond = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
            assert driver.execute_script(beyond) <= 0, name
            # A cell whose text is broken into letters is narrower than a word.
            narrow = """return [...document.querySelectorAll('article td')].filter(
                e => e.innerText.trim().length > 3 && e.getBoundingClientRect().width < 35).length"""
            assert driver.execute_script(narrow) == 0, name


@needs_browser
def test_browser_cuts_nothing_on_a_common_screen(site):
    """At 1280 pixels neither code, tables and formulas nor entries of the right sidebar."""
    cut = """const right = e => e.getBoundingClientRect().right;
        const sidebar = document.querySelector('.bd-sidebar-secondary');
        const cut = [...document.querySelectorAll('article :is(pre, table, .formula)')].filter(
            e => e.scrollWidth > e.clientWidth + 1);
        const beyond = [...document.querySelectorAll('.bd-sidebar-secondary .nav-link *')].filter(
            e => right(e) > right(sidebar));
        return [...cut, ...beyond].map(e => e.textContent.slice(0, 80))"""
    size = {"width": 1280, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    pages = [page.relative_to(site).as_posix() for page in site.rglob("*.html")]
    with browser.served(site) as address, browser.started() as driver:
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        for page in pages:
            if not page.startswith(("_static/", "decisions/")):
                driver.get(f"{address}/{page}")
                assert driver.execute_script(cut) == [], page


@needs_browser
def test_browser_shows_labels_on_a_phone(site):
    """A table of two columns is whole, and one of numbers keeps its first column as it scrolls."""
    whole = """return [...document.querySelectorAll('article table')].filter(
        e => e.querySelector('tr > td:nth-child(2):last-child') && e.scrollWidth > e.clientWidth + 1
    ).length"""
    moved = """const table = document.querySelector('article table.benchmark');
        const name = table.querySelector('td'), left = name.getBoundingClientRect().left;
        table.scrollLeft = 100;
        return [table.scrollLeft, name.getBoundingClientRect().left - left]"""
    size = {"width": 390, "height": 900, "deviceScaleFactor": 1, "mobile": True}
    with browser.served(site) as address, browser.started() as driver:
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        for name in ("migrate/liger", "migrate/xformers", "reference/loss", "reference/ways"):
            driver.get(f"{address}/{name}.html")
            assert driver.execute_script(whole) == 0, name
        driver.get(f"{address}/performance/heads.html")
        scrolled, left = driver.execute_script(moved)
        assert scrolled == 100
        assert abs(left) < 2


# Of each text of an article: its colour against that of what lies behind it, by WCAG's definition.
# A canvas turns every notation of a colour into four bytes.
FAINT = """
    const context = Object.assign(document.createElement('canvas'), {width: 1, height: 1})
        .getContext('2d', {willReadFrequently: true}), known = new Map();
    const bytes = text => {
        if (!known.has(text)) {
            context.clearRect(0, 0, 1, 1);
            context.fillStyle = text;
            context.fillRect(0, 0, 1, 1);
            known.set(text, [...context.getImageData(0, 0, 1, 1).data]);
        }
        return known.get(text);
    };
    const over = (top, below) => below.map((b, i) => top[i] * top[3] / 255 + b * (1 - top[3] / 255));
    const behind = e => e === null ? [255, 255, 255]
        : over(bytes(getComputedStyle(e).backgroundColor), behind(e.parentElement));
    const luminance = color => {
        const [r, g, b] = color.map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92
                                                         : ((c + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const seen = [], faint = [];
    const texts = document.createTreeWalker(document.querySelector('article'), NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
        const e = texts.currentNode.parentElement, box = e.getBoundingClientRect();
        if (!texts.currentNode.data.trim() || !box.width || !e.checkVisibility({checkOpacity: true,
            checkVisibilityCSS: true}) || e.closest('.headerlink, .copybtn, script, style')) continue;
        const back = behind(e), front = over(bytes(getComputedStyle(e).color), back);
        const [dark, light] = [luminance(back), luminance(front)].sort((a, b) => a - b);
        const contrast = (light + 0.05) / (dark + 0.05);
        seen.push(e.closest('pre') ? 'block' : e.closest('td') ? 'cell' : e.closest('code') ? 'code'
                  : e.closest('p') ? 'text' : 'other');
        if (contrast < 4.5) faint.push([contrast.toFixed(2), e.outerHTML.slice(0, 120), front, back]);
    }
    return [document.documentElement.dataset.theme, [...new Set(seen)], faint];
"""


@needs_browser
@pytest.mark.parametrize("theme", ["dark", "light"])
def test_browser_text_stands_out_from_its_background(site, theme):
    """Text, code and cells of tables, as a reader sees them whose system asks for this theme."""
    names = ["index", "install", "howto/workspace", "howto/own_loss", "migrate/liger", "reference/loss"]
    names += ["reference/command_line", "explanation/attention", "performance/h200", "py-modindex"]
    asked = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    kinds = set()
    with browser.served(site) as address, browser.started() as driver:
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", asked)
        for name in names:
            driver.get(f"{address}/{name}.html")
            shown, found, faint = driver.execute_script(FAINT)
            assert (shown, faint) == (theme, []), name
            kinds |= {*found}
    assert kinds >= {"text", "code", "block", "cell"}
