"""The built site in a browser: every link, a formula, and the search."""

import urllib.request

import pytest

from tests.docs.site import browser

pytestmark = pytest.mark.extended  # building it takes seconds, in a process of its own


# What the browser's parser finds on a page: its ids, and where its links lead. To show the page
# would take ten times as long.
READ_PAGE = """
    const [page, done] = arguments;
    fetch(page).then(async answer => {
        if (!answer.ok) return done([answer.status, [], []]);
        const parsed = new DOMParser().parseFromString(await answer.text(), 'text/html');
        done([answer.status, [...parsed.querySelectorAll('[id]')].map(e => e.id),
              [...parsed.querySelectorAll('a[href]')].map(e => new URL(e.getAttribute('href'), page).href)]);
    });
"""


@browser.needed
def test_browser_follows_every_link(site, browsed):
    """From the first page to every page, and to every place on one that a link names."""
    address, driver = browsed
    ahead, ids, linked, files = [f"{address}/index.html"], {}, set(), set()
    driver.get(ahead[0])
    while ahead:
        page = ahead.pop()
        if page in ids:
            continue
        status, found, links = driver.execute_async_script(READ_PAGE, page)
        assert status == 200, page
        ids[page] = {*found}
        for link in links:
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


@browser.needed
def test_browser_renders_a_formula(browsed):
    """A numerator stands above its denominator."""
    script = """
        const fraction = document.querySelector('math mfrac');
        return [...fraction.children].map(e => { const b = e.getBoundingClientRect();
                                                 return [b.top, b.bottom, b.width]; });
    """
    address, driver = browsed
    driver.get(f"{address}/explanation/attention.html")
    (_, bottom, width), (top, _, other) = driver.execute_script(script)
    assert min(width, other) > 3
    assert bottom <= top + 1


@browser.needed
def test_browser_finds_workspace_by_search(browsed):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    address, driver = browsed
    driver.get(f"{address}/search.html?q=workspace")
    here = (By.CSS_SELECTOR, "#search-results li a[href*='howto/workspace.html']")
    WebDriverWait(driver, 60).until(lambda driver: driver.find_elements(*here))
    driver.find_element(*here).click()
    WebDriverWait(driver, 60).until(lambda driver: "Choosing a workspace" in driver.title)


@browser.needed
def test_browser_search_puts_tasks_before_records(browsed):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    first = {"slow": "reference/ways", "out of memory": "start/memory", "chunk loop": "migrate/chunk_loop"}
    address, driver = browsed
    for query, page in first.items():
        driver.get(f"{address}/search.html?q={query.replace(' ', '+')}")
        summary = (By.CSS_SELECTOR, ".search-summary")
        WebDriverWait(driver, 60).until(
            lambda driver, summary=summary: "finished" in driver.find_element(*summary).text
        )
        links = driver.find_elements(By.CSS_SELECTOR, "#search-results li > a")
        found = [link.get_attribute("href").removeprefix(f"{address}/").partition(".")[0] for link in links]
        assert page in found[:3], (query, found)
        records = [place for place, name in enumerate(found) if name.startswith("decisions/")]
        assert records == [*range(len(found) - len(records), len(found))], (query, found)
