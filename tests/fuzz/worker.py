"""One case; and the process that runs them, one line of standard input after the other.

A case is a function of a Draw that returns what to check, as a function: so its description is
known before anything of lowtide runs, also to whoever survives a crash.
"""

import gc
import importlib
import json
import os
import sys
import time
import traceback
import warnings
from typing import Any, NamedTuple

import torch

from tests.fuzz.draw import Draw
from tests.fuzz.subjects import SUBJECTS


class Outcome(NamedTuple):
    description: str
    finding: str | None
    seconds: float
    broken: bool = False
    """Whether the device is of no more use to this process."""


def run_case(subject: str, seed: int, device: str = "cpu", started: Any = None) -> Outcome:
    """`started` is called with the description, before anything runs that may crash."""
    draw, finding, broken, begin = Draw(seed, device), None, False, time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.manual_seed(seed)
            check = importlib.import_module(SUBJECTS[subject]).case(draw)
            if started is not None:
                started(draw.description)
            check()
            if device == "cuda":
                torch.cuda.synchronize()
        except Exception as error:
            finding = described(error)
            broken = "CUDA error" in str(error) or type(error).__name__ == "AcceleratorError"
    # A torch.utils.checkpoint whose function has raised leaves its hooks while the error is kept.
    if _has_hooks():
        gc.collect()
        broken = broken or _has_hooks()
    return Outcome(draw.description, finding, time.perf_counter() - begin, broken)


def _has_hooks() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def described(error: BaseException) -> str:
    """The message, and the last lines of ours and of lowtide's that it came through."""
    text = f"{type(error).__name__}: {error}".strip()
    if type(error).__name__ == "Finding":
        return text.removeprefix("Finding: ")
    frames = traceback.extract_tb(error.__traceback__)
    own = [each for each in frames if "lowtide" in each.filename or "tests" in each.filename]
    places = (f"{os.path.relpath(each.filename)}:{each.lineno}" for each in own[-3:])
    return f"{text[:1500]} [{', '.join(places)}]"


def prepare(device: str) -> None:
    """As tests/conftest.py does for the suite."""
    torch.set_num_threads(1)
    # Backward runs in one thread: a checkpoint that raises in another thread would leave its hooks
    # there, for later cases.
    torch.autograd.set_multithreading_enabled(False)
    if device == "cpu" and importlib.util.find_spec("triton"):
        from tests.support.interpreter import leave_out_what_has_no_effect

        leave_out_what_has_no_effect()
    from tests.support.unwritten import poison

    poison(setattr)


def main() -> None:
    device = sys.argv[1]
    # What libraries print must not get between the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    prepare(device)

    def answer(**parts: Any) -> None:
        answers.write(json.dumps(parts) + "\n")

    answer(ready=True)
    for line in sys.stdin:
        subject, seed = line.split()
        outcome = run_case(subject, int(seed), device, lambda words: answer(started=words))
        answer(**outcome._asdict())
        if outcome.broken:
            sys.exit(3)


if __name__ == "__main__":
    main()
