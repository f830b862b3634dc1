"""Pages fit the width of screens and phones in a browser, and have readable colours."""

import pytest

from tests.docs.site import browser
from tests.docs.snippets import DOCS

pytestmark = pytest.mark.extended  # building it takes seconds, in a process of its own


@browser.needed
@pytest.mark.parametrize("width", [390, 1280])
def test_browser_pages_fit_their_width(browsed, width):
    """Wide tables, formulas and code scroll by themselves."""
    names = ["index", "install", "howto/workspace", "reference/loss", "reference/ways", "reference/models"]
    names += ["explanation/attention", "performance/h200", "performance/attention", "examples/index"]
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    address, driver = browsed
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


@browser.needed
def test_browser_cuts_nothing_on_a_common_screen(site, browsed):
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
    address, driver = browsed
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    for page in pages:
        if not page.startswith(("_static/", "decisions/")):
            driver.get(f"{address}/{page}")
            assert driver.execute_script(cut) == [], page


@browser.needed
def test_browser_shows_labels_on_a_phone(browsed):
    """A table of two columns is whole, and one of numbers keeps its first column as it scrolls."""
    whole = """return [...document.querySelectorAll('article table')].filter(
        e => e.querySelector('tr > td:nth-child(2):last-child') && e.scrollWidth > e.clientWidth + 1
    ).length"""
    moved = """const table = document.querySelector('article table.benchmark');
        const name = table.querySelector('td'), left = name.getBoundingClientRect().left;
        table.scrollLeft = 100;
        return [table.scrollLeft, name.getBoundingClientRect().left - left]"""
    size = {"width": 390, "height": 900, "deviceScaleFactor": 1, "mobile": True}
    address, driver = browsed
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


@browser.needed
@pytest.mark.parametrize("theme", ["dark", "light"])
def test_browser_text_stands_out_from_its_background(browsed, theme):
    """Text, code and cells of tables, as a reader sees them whose system asks for this theme."""
    names = ["index", "install", "howto/workspace", "howto/own_loss", "migrate/liger", "reference/loss"]
    names += ["reference/command_line", "explanation/attention", "performance/h200", "py-modindex"]
    asked = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    kinds = set()
    address, driver = browsed
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", asked)
    for name in names:
        driver.get(f"{address}/{name}.html")
        shown, found, faint = driver.execute_script(FAINT)
        assert (shown, faint) == (theme, []), name
        kinds |= {*found}
    assert kinds >= {"text", "code", "block", "cell"}
