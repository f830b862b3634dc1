"""Run what is profiled: a user's script, as `python script.py` would, or training steps.

Each function returns the record and an exit status. A run that fails or is interrupted is recorded
up to that point.
"""

import contextlib
import runpy
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lowtide.tools.errors import UserError
from lowtide.tools.estimate.setting import Loss, Setting
from lowtide.tools.estimate.training import training
from lowtide.tools.profile.record import Record, recording

INTERRUPTED = 128 + signal.SIGINT


def script(path: Path, arguments: Sequence[str], device: str) -> tuple[Record, int]:
    if not path.is_file():
        raise UserError(f"{path}: {'not a file' if path.exists() else 'no such file'}")

    def work() -> None:
        try:
            runpy.run_path(str(path), run_name="__main__")
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as problem:
            _print_exception(problem, path)
            sys.exit(1)

    before = sys.argv, sys.path
    sys.argv, sys.path = [str(path), *arguments], [str(path.resolve().parent), *sys.path]
    try:
        return _recorded(work, device)
    finally:
        sys.argv, sys.path = before


def steps(setting: Setting, loss: Loss, count: int, device: str) -> tuple[Record, int]:
    with training(setting, loss, device) as (step, _, _):
        step()
        return _recorded(lambda: [step() for _ in range(count)], device)


def _recorded(work: Callable[[], object], device: str) -> tuple[Record, int]:
    status = 0
    with recording(device) as record, _terminated_as_exit():
        try:
            work()
        except SystemExit as end:
            status = _status(end.code)
        except KeyboardInterrupt:
            status = INTERRUPTED
    return record, status


@contextlib.contextmanager
def _terminated_as_exit() -> Iterator[None]:
    """End the block on SIGTERM as sys.exit would: a job out of time leaves its record, too."""

    def end(number: int, frame: Any) -> None:
        sys.exit(128 + number)

    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _status(code: object) -> int:
    """Return the exit status as Python does: anything but a number is printed."""
    if code is None or isinstance(code, int):
        return int(code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1


def _print_exception(problem: BaseException, path: Path) -> None:
    """Print the exception as Python would, without the frames before the script's."""
    trace = problem.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != str(path):
        trace = trace.tb_next
    traceback.print_exception(type(problem), problem, trace)
