import os
import subprocess
import sys

import pytest

from tests.docs.site import browser
from tests.docs.snippets import DOCS, ROOT

BUILT = DOCS / "_build" / "html" / ".built"  # `make docs` leaves it behind where nothing failed
SOURCES = "docs", "lowtide", "benchmarks", "examples", "README.md", "CHANGELOG.md", "CONTRIBUTING.md"


def _is_current(stamp):
    """Return True if the site was built after everything that it is built from was changed."""
    if not stamp.exists():
        return False
    made = stamp.stat().st_mtime
    paths = (path for source in SOURCES for path in (ROOT / source, *(ROOT / source).rglob("*")))
    return all(
        path.stat().st_mtime <= made
        for path in paths
        if path.is_file() and stamp.parents[1] not in path.parents and "__pycache__" not in path.parts
    )


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """The site's folder and what building it printed; built once for all workers."""
    if _is_current(BUILT):
        return BUILT.parent, "0\n"
    for package in ("sphinx", "pydata_sphinx_theme", "myst_nb", "latex2mathml", "sphinx_design", "triton"):
        pytest.importorskip(package)
    filelock = pytest.importorskip("filelock")
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, log = shared / "site", shared / "site.log"
    with filelock.FileLock(shared / "site.lock"):
        if not log.exists():
            environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
            environment["PYTHONPATH"] = str(ROOT)
            arguments = ("--fail-on-warning", "--keep-going", "--quiet", DOCS, folder)
            done = subprocess.run(
                [sys.executable, "-m", "sphinx", *arguments],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            log.write_text(f"{done.returncode}\n{done.stdout}{done.stderr}")
    return folder, log.read_text()


@pytest.fixture
def site(built):
    folder, log = built
    assert log.startswith("0\n"), log
    return folder


@pytest.fixture(scope="module")
def opened(built):
    """The address of the site, and a browser: starting and ending one takes two seconds."""
    with browser.served(built[0]) as address, browser.started() as driver:
        yield address, driver


@pytest.fixture
def browsed(site, opened):
    """The same in its first state: of no page, its own size and nothing stored but files."""
    address, driver = opened
    yield address, driver
    driver.execute_script(
        "if (location.protocol != 'about:') { sessionStorage.clear(); localStorage.clear() }"
    )
    driver.get("about:blank")
    driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
