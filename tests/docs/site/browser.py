"""A headless Chromium of the system, if there is one, and the site on a port of this machine."""

import contextlib
import functools
import http.server
import shutil
import tempfile
import threading

import pytest

ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)


def why_none():
    """Why no browser can be started, or None."""
    for program in ("chromium", "chromedriver"):
        if shutil.which(program) is None:
            return f"{program} is not installed: apt-get install chromium chromium-driver"
    try:
        import selenium  # noqa: F401
    except ModuleNotFoundError:
        return "selenium is not installed"
    return None


needed = pytest.mark.skipif(why_none() is not None, reason=str(why_none()))


@contextlib.contextmanager
def started(width=1280, height=900):
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    with tempfile.TemporaryDirectory() as profile:
        for argument in (*ARGUMENTS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
            options.add_argument(argument)
        driver = webdriver.Chrome(options, service)
        try:
            yield driver
        finally:
            driver.quit()


class _Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def end_headers(self):
        # Every page has the same styles, scripts and fonts, which the browser then asks for once.
        self.send_header("Cache-Control", "max-age=3600")
        super().end_headers()


@contextlib.contextmanager
def served(folder):
    """The address at which a folder is served."""
    handler = functools.partial(_Silent, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
