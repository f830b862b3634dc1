"""Processes that run cases side by side: started again after a crash, stopped after a timeout.

Each takes the subject that has had the least time so far, so that all have the same.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

COMMAND = (sys.executable, "-m", "tests.fuzz.worker")
START = 300.0  # seconds that a process may take to import what it needs


class Finding(NamedTuple):
    subject: str
    seed: int
    description: str
    text: str


class Process:
    """A worker that is started when it is needed."""

    def __init__(self, device: str, timeout: float, command: Sequence[str]) -> None:
        self.device, self.timeout, self.command = device, timeout, command
        self.process: subprocess.Popen[bytes] | None = None

    def run(self, subject: str, seed: int) -> tuple[str, str | None]:
        """The description of a case, and what was found."""
        if self.process is None:
            self._start()
        assert self.process is not None
        assert self.process.stdin is not None
        words = ""
        try:
            self.process.stdin.write(f"{subject} {seed}\n".encode())
            self.process.stdin.flush()
            answer = self._answer(self.timeout)
            while "started" in answer:
                words = answer["started"]
                answer = self._answer(self.timeout)
        except TimeoutError:
            self.stop()
            return words, f"no answer after {self.timeout:.0f} s"
        except (EOFError, OSError):
            return words, self._epitaph()
        if answer["broken"]:
            self.stop()
        return answer["description"], answer["finding"]

    def _start(self) -> None:
        # On the CPU, kernels run through Triton's interpreter.
        more = {"OMP_NUM_THREADS": "1"} | ({"TRITON_INTERPRET": "1"} if self.device == "cpu" else {})
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [*self.command, self.device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=os.environ | more,
            start_new_session=True,  # Ctrl-C is for the one who sums up
        )
        self.pending = b""
        try:
            self._answer(START)
        except (EOFError, TimeoutError):
            raise SystemExit(f"a worker did not start: {self._epitaph()}") from None

    def _answer(self, timeout: float) -> dict[str, Any]:
        assert self.process is not None
        assert self.process.stdout is not None
        end = time.monotonic() + timeout
        while b"\n" not in self.pending:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                raise TimeoutError
            more = os.read(self.process.stdout.fileno(), 1 << 16)
            if not more:
                raise EOFError
            self.pending += more
        line, self.pending = self.pending.split(b"\n", 1)
        return json.loads(line)

    def _epitaph(self) -> str:
        assert self.process is not None
        code = self.process.wait()
        self.errors.seek(0)
        last = self.errors.read().decode(errors="replace").strip().splitlines()[-8:]
        self.stop()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"
        return f"the process ended with {how}: {' | '.join(last)[-1500:]}"

    def stop(self) -> None:
        if self.process is None:
            return
        self.process.kill()
        self.process.wait()
        for each in (self.process.stdin, self.process.stdout, self.errors):
            assert each is not None
            with contextlib.suppress(BrokenPipeError):  # the case that it was sent and did not read
                each.close()
        self.process = None


class Pool:
    """Counts of cases and findings by subject, filled by `run`."""

    def __init__(
        self,
        subjects: Sequence[str],
        device: str,
        report: Callable[[Finding], None],
        *,
        workers: int = 1,
        timeout: float = 60.0,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self.device, self.report, self.workers = device, report, workers
        self.timeout, self.command = timeout, command
        self.spent = dict.fromkeys(subjects, 0.0)
        self.cases = dict.fromkeys(subjects, 0)
        self.found = dict.fromkeys(subjects, 0)
        self.handed = dict.fromkeys(subjects, 0)
        self.lock = threading.Lock()
        self.failure: BaseException | None = None

    def run(self, first: int, *, seconds: float | None = None, count: int | None = None) -> None:
        """Cases of the seeds from `first` on: for so long, or so many of each subject."""
        self.end = None if seconds is None else time.monotonic() + seconds
        threads = [
            threading.Thread(target=self._work, args=(first, count), daemon=True) for _ in range(self.workers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.2)
        if self.failure is not None:
            raise self.failure

    def _work(self, first: int, count: int | None) -> None:
        process = Process(self.device, self.timeout, self.command)
        try:
            while (case := self._next(count)) is not None:
                subject, seed, begin = case[0], first + case[1], time.monotonic()
                words, text = process.run(subject, seed)
                with self.lock:
                    self.spent[subject] += time.monotonic() - begin
                    self.cases[subject] += 1
                    self.found[subject] += text is not None
                    if text is not None:
                        self.report(Finding(subject, seed, words, text))
        except BaseException as error:
            self.failure = error
        finally:
            process.stop()

    def _next(self, count: int | None) -> tuple[str, int] | None:
        with self.lock:
            over = self.end is not None and time.monotonic() >= self.end
            open_ = [each for each in self.spent if count is None or self.handed[each] < count]
            if over or not open_ or self.failure is not None:
                return None
            subject = min(open_, key=lambda each: self.spent[each])
            self.spent[subject] += 1e-3  # so that another worker takes another subject
            self.handed[subject] += 1
            return subject, self.handed[subject] - 1
