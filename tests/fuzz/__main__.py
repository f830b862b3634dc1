"""The command line: runs cases, prints each finding with a command to repeat it, sums up."""

import argparse
import os
import random
import sys
import time

from tests.fuzz.pool import Finding, Pool
from tests.fuzz.subjects import SUBJECTS


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, help="how long to go on (60, if --count is not given)")
    parser.add_argument("--count", type=int, help="cases of each subject")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--subject", action="append", choices=list(SUBJECTS), help="all, if none is given")
    parser.add_argument("--seed", type=int, help="of the first case; random by default")
    parser.add_argument("--workers", type=int, help="processes side by side")
    given = parser.parse_args(arguments)

    seconds = 60.0 if given.seconds is None and given.count is None else given.seconds
    first = random.SystemRandom().randrange(1 << 31) if given.seed is None else given.seed
    cpus = len(os.sched_getaffinity(0))
    workers = given.workers or (min(cpus, 2) if given.device == "cpu" else max(1, min(cpus // 2, 8)))
    if given.count is not None:
        workers = min(workers, given.count * len(given.subject or SUBJECTS))

    def report(finding: Finding) -> None:
        print(
            f"FINDING {finding.subject} {finding.description}\n    {finding.text}\n    "
            f"python -m tests.fuzz --device {given.device} --subject {finding.subject} "
            f"--seed {finding.seed} --count 1",
            flush=True,
        )

    print(f"seeds from {first} on, device {given.device}, {workers} workers", flush=True)
    # The first kernels of a kind are compiled, on a busy machine for a minute.
    pool = Pool(
        given.subject or list(SUBJECTS),
        given.device,
        report,
        workers=workers,
        timeout=60.0 if given.device == "cpu" else 240.0,
    )
    begin = time.monotonic()
    try:
        pool.run(first, seconds=seconds, count=given.count)
    except KeyboardInterrupt:
        print("interrupted")
    print(f"{'subject':14}{'cases':>8}{'findings':>10}{'s':>8}")
    for subject, cases in pool.cases.items():
        print(f"{subject:14}{cases:8}{pool.found[subject]:10}{pool.spent[subject]:8.0f}")
    total, found = sum(pool.cases.values()), sum(pool.found.values())
    print(f"{'all':14}{total:8}{found:10}{time.monotonic() - begin:8.0f}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
