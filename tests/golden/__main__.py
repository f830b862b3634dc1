"""The command line of the golden set; tests/golden/__init__.py says how to use it."""

import argparse
import json
import os
import sys
from pathlib import Path


def main() -> int:
    arguments = _parse()
    if arguments.command == "compare":
        recorded = json.loads(Path(arguments.file).read_text())
        arguments.device = recorded["environment"]["device"]
    # Both are read when torch and Triton are imported, here and in the processes that share the
    # calls.
    os.environ["OMP_NUM_THREADS"] = "1"
    if arguments.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    from tests.golden import host, record
    from tests.golden.calls import calls_on

    if arguments.command == "host":
        record.prepare(arguments.device)
        found = {
            "environment": record.environment(arguments.device),
            "us": host.microseconds(arguments.device),
        }
        print(json.dumps(found, indent=1))
        return 0

    environment = record.environment(arguments.device)
    if arguments.command == "compare" and environment != recorded["environment"]:
        print(
            f"bits depend on what is not the same: recorded on {recorded['environment']}, here {environment}"
        )
        return 2
    # A CUDA record mostly waits for the compilation of kernels on the host.
    jobs = arguments.jobs or (8 if arguments.device == "cuda" else 1)
    names = [name for name in calls_on(arguments.device) if arguments.only in name]
    calls = record.record(names, arguments.device, jobs)
    if arguments.command == "record":
        failed = {name: call["error"] for name, call in calls.items() if "error" in call}
        calls = {name: call for name, call in calls.items() if name not in failed}
        Path(arguments.out).write_text(json.dumps({"environment": environment, "calls": calls}, indent=1))
        for name, call in calls.items():
            print(f"{name:50} {'; '.join(call['engines'])}")
        for name, error in failed.items():
            print(f"NOT RECORDED {name}: {error}")
        print(f"{len(calls)} calls recorded in {arguments.out}")
        return 1 if failed else 0
    before = {name: call for name, call in recorded["calls"].items() if arguments.only in name}
    found = record.differences(before, calls)
    print(*found, f"{len(calls)} calls compared, {len(found)} differences", sep="\n")
    return 1 if found else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.golden")
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="write what each call gives here")
    comparing = commands.add_parser("compare", help="run the recorded calls again, print what differs")
    timing = commands.add_parser("host", help="print the microseconds that the host takes for small calls")
    recording.add_argument("--out", required=True, metavar="FILE.json")
    comparing.add_argument("file", metavar="FILE.json")
    for command in (recording, timing):
        command.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    for command in (recording, comparing):
        command.add_argument("--only", default="", metavar="TEXT", help="calls with this in their name")
        command.add_argument("--jobs", type=int, help="processes that share the calls: on CUDA 8, else 1")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
