import os
import subprocess
import sys

import pytest

from tests.docs.snippets import DOCS, ROOT


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """The site's folder and what building it printed; built once for all workers."""
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
