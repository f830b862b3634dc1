"""What is profiled: a user's script as `python script.py` would run it, or training steps of a model."""

import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from lowtide.estimate.setting import Loss, Setting
from lowtide.estimate.training import training
from lowtide.profile.record import Record, recording
from lowtide.train.config import UserError


def script(path: Path, arguments: Sequence[str], device: str) -> tuple[Record, int]:
    """The record, and the exit status: what a script that fails has allocated is worth a look, above all."""
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    status = 0
    before = sys.argv, sys.path
    sys.argv, sys.path = [str(path), *arguments], [str(path.resolve().parent), *sys.path]
    try:
        with recording(device) as record:
            try:
                runpy.run_path(str(path), run_name="__main__")
            except SystemExit as end:
                if isinstance(end.code, str):
                    print(end.code, file=sys.stderr)
                status = end.code if isinstance(end.code, int) else int(end.code is not None)
            except Exception:
                traceback.print_exc()
                status = 1
    finally:
        sys.argv, sys.path = before
    return record, status


def steps(setting: Setting, loss: Loss, count: int, device: str) -> Record:
    with training(setting, loss, device) as (step, _, _):
        step()
        with recording(device) as record:
            for _ in range(count):
                step()
    return record
