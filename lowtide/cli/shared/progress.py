"""Show the progress of work that may take seconds or minutes, without a total."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console

SPINNER_SECONDS, LINE_SECONDS = 0.25, 10.0


@contextlib.contextmanager
def progress(title: str) -> Iterator[Callable[[str], None]]:
    """Yield a function that takes a description of the current work.

    The description is shown on the standard error with the seconds so far. On a terminal it stands
    beside a spinner. Elsewhere a line is printed every ten seconds.
    """
    console = Console(stderr=True, highlight=False)
    started, ended, words = time.monotonic(), threading.Event(), ""

    def tell(now: str) -> None:
        nonlocal words
        words = now

    def show(write: Callable[[str], None], seconds: float) -> None:
        while not ended.wait(seconds):
            write(f"{title}: {words}, {time.monotonic() - started:.0f} s")

    def line(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    with contextlib.ExitStack() as stack:
        if console.is_terminal:
            spinner = stack.enter_context(console.status(title))
            arguments: tuple = (spinner.update, SPINNER_SECONDS)
        else:
            arguments = (line, LINE_SECONDS)
        thread = threading.Thread(target=show, args=arguments, daemon=True)
        thread.start()
        try:
            yield tell
        finally:
            ended.set()
            thread.join()
