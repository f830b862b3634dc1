"""Build the package, and test it in environments of its own.

    python scripts/environments.py package     # this Python, and the torch of constraints.txt
    python scripts/environments.py versions    # every Python with every torch, and the integrations

`package` builds sdist and wheel, checks their metadata, and runs the contract (tests/contract.txt)
on the installed wheel, where nothing of the checkout can be imported; then tests of the pages and
the layering in the unpacked sdist; then `lowtide[hf]` alone on a small Llama. `versions` runs the
contract in an environment for each pair, and writes a row of each to docs/_data/versions.csv when
it ends: an interrupted run keeps what it has, and a pair that is run again replaces its row.
`--only 3.10:2.9` runs one pair, `--only 3.13:2.15:integrations` one of the others, and `--suite
selftest` of each pair the fifty calls of `lowtide doctor --selftest` alone, in a minute.

uv makes the environments. It takes the Pythons on PATH, and downloads others; UV_TORCH_BACKEND=cpu
spares the gigabytes of CUDA that torch from the package index brings.
"""

import argparse
import csv
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import xml.etree.ElementTree as ElementTree
import zipfile
from collections.abc import Sequence
from datetime import datetime, timezone
from email import message_from_bytes
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs" / "_data" / "versions.csv"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
TORCHES = ("2.9", "2.11", "2.13", "2.15")
NOT_BUILT = {("3.10", "2.15")}  # torch has no wheel of this release for this Python
FRAMEWORKS = ("accelerate", "lightning", "peft", "transformers", "trl")
SUITES = {"contract": ["@tests/contract.txt"], "integrations": ["tests/integrations"]}  # of pytest
FROM_SDIST = ["tests/test_documents.py", "tests/test_layering.py", "tests/test_suite.py"]
# What docs/install.md promises of `lowtide[hf]`, with no other extra.
HF_ALONE = """
import torch, transformers, lowtide
from lowtide.integrations.transformers import TransformersDeferralCallback, register_attention

register_attention()
sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
config = transformers.LlamaConfig(**sizes, num_attention_heads=4, attn_implementation="lowtide")
model, tokens = transformers.LlamaForCausalLM(config).train(), torch.randint(97, (2, 16))
with torch.no_grad():
    expected = model(input_ids=tokens, labels=tokens).loss
    model.set_attn_implementation("eager")
    torch.testing.assert_close(model(input_ids=tokens, labels=tokens).loss, expected)
deferral = lowtide.defer_logits(model)
loss = model(input_ids=tokens, labels=tokens).loss
loss.backward()
torch.testing.assert_close(loss, expected)
assert deferral.fused == 1 and TransformersDeferralCallback().fused == 0
"""
MARKS = "not extended and not every_build and not gpu"
COLUMNS = (
    *("date", "commit", "python", "torch", "suite", "versions"),
    *("passed", "failed", "skipped", "seconds", "first_failure"),
)


class Environment(NamedTuple):
    python: str
    torch: str
    suite: str = "contract"
    extra: str = "test"
    pinned: tuple[str, ...] = ()
    """Requirements beside the extra."""

    @property
    def name(self) -> str:
        return f"{self.python}:{self.torch}" + f":{self.suite}" * (self.suite != "contract")


class Built(NamedTuple):
    wheel: Path
    sdist: Path


# The interpreter of Triton 3.5 and 3.6 takes arrays for numbers, which newer releases refuse.
PINNED = {"2.9": ("numpy<2.3",), "2.11": ("numpy<2.3",)}
PAIRS = [  # In this order each Python and each torch has run after four environments.
    (PYTHONS[(place + shift) % len(PYTHONS)], torch)
    for shift in range(len(PYTHONS))
    for place, torch in enumerate(TORCHES)
]
ENVIRONMENTS = (
    *(
        Environment(python, torch, suite, extra, PINNED.get(torch, ()))
        for suite, extra in (("contract", "test"), ("selftest", "cli"))
        for python, torch in PAIRS
        if (python, torch) not in NOT_BUILT
    ),
    Environment(PYTHONS[-1], TORCHES[-1], "integrations", "integrations,test"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("command", choices=("package", "versions"))
    parser.add_argument("--only", action="append", help="PYTHON:TORCH[:SUITE]; repeatable")
    parser.add_argument("--suite", choices=("contract", "selftest", "integrations"), help="all by default")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="where sdist and wheel are put")
    parser.add_argument("--processes", default="auto", help="as pytest -n takes them")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        built = build(given.dist)
        if given.command == "package":
            failed = check_package(built, Path(folder), given.processes)
        else:
            chosen = choose(given.only, given.suite)
            failed = check_versions(built, Path(folder), given.processes, chosen)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def build(folder: Path) -> Built:
    """Build the sdist, and the wheel out of the sdist."""
    shutil.rmtree(folder, ignore_errors=True)
    run([sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)])
    return Built(next(folder.glob("*.whl")), next(folder.glob("*.tar.gz")))


def check_package(built: Built, folder: Path, processes: str) -> list[str]:
    run([sys.executable, "-m", "twine", "check", "--strict", *map(str, built)])
    check_contents(built)
    torch = next(
        line.partition("==")[2]
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line.startswith("torch==")
    )
    environment = Environment(f"{sys.version_info.major}.{sys.version_info.minor}", torch)
    python = install(environment, built, folder / "environment")
    wheel = pytest(python, SUITES["contract"], unpack(built, folder / "tests", without="lowtide"), processes)
    print(f"the contract on the installed wheel: {wheel['passed']} passed, {wheel['failed']} failed")
    sdist = pytest(python, FROM_SDIST, unpack(built, folder / "sdist"), processes)
    print(f"tests of the sdist: {sdist['passed']} passed, {sdist['failed']} failed")
    hf = hf_alone(install(environment._replace(extra="hf"), built, folder / "hf"))
    print(f"lowtide[hf] alone: {hf['first_failure'] or 'passed'}")
    suites = {"wheel": wheel, "sdist": sdist, "lowtide[hf]": hf}
    return [name for name, found in suites.items() if found["first_failure"]]


def check_contents(built: Built) -> None:
    """The wheel has what is read at run time and no tests; its description has no relative link.

    The sdist has what pyproject.toml names, the settings of git that hatchling adds, and nothing
    else of the working tree.
    """
    with zipfile.ZipFile(built.wheel) as wheel:
        names = wheel.namelist()
        metadata = message_from_bytes(wheel.read(next(name for name in names if name.endswith("/METADATA"))))
    for file in (ROOT / "lowtide").rglob("*"):
        if file.is_file() and "__pycache__" not in file.parts:
            assert file.relative_to(ROOT).as_posix() in names, f"{file} is not in the wheel"
    assert all(name.startswith("lowtide") for name in names), names
    with tarfile.open(built.sdist) as sdist:
        parts = [Path(name).parts for name in sdist.getnames()]
    in_sdist = {each[1] for each in parts if len(each) > 1}
    assert in_sdist == {*source_distribution(), ".gitignore", "PKG-INFO"}, in_sdist
    description = str(metadata.get_payload(decode=False))
    targets = [part.partition(")")[0] for part in description.split("](")[1:]]
    assert all(target.startswith(("https://", "http://", "#")) for target in targets), targets


def source_distribution() -> list[str]:
    """Return the names that pyproject.toml lists for the sdist."""
    table = (ROOT / "pyproject.toml").read_text().partition("[tool.hatch.build.targets.sdist]\n")[2]
    found = re.match(r"only-include = \[\n(.*?)^\]$", table, flags=re.MULTILINE | re.DOTALL)
    assert found is not None
    return re.findall(r'"(.+?)"', found[1])


def choose(only: Sequence[str] | None, suite: str | None) -> list[Environment]:
    """The environments of these names, or of this suite, or all."""
    chosen = [each for each in ENVIRONMENTS if not only or each.name in only]
    if only and len(chosen) < len(set(only)):
        sys.exit(f"--only must name some of {', '.join(each.name for each in ENVIRONMENTS)}")
    return [each for each in chosen if suite in (None, each.suite)]


def check_versions(built: Built, folder: Path, processes: str, chosen: Sequence[Environment]) -> list[str]:
    failed, built_from = [], commit()
    for environment in chosen:
        place = folder / environment.name.replace(":", "-")
        started = time.monotonic()
        python = install(environment, built, place / "environment")
        if environment.suite == "selftest":
            found = selftest(python)
        else:
            tests = unpack(built, place / "tests", without="lowtide")
            found = pytest(python, SUITES[environment.suite], tests, processes)
        row = {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "commit": built_from,
            "python": environment.python,
            "torch": environment.torch,
            "suite": environment.suite,
            "versions": versions(python),
            "seconds": f"{time.monotonic() - started:.0f}",
            **found,
        }
        write(row)
        print(f"{environment.name}: {found['passed']} passed, {found['failed']} failed", flush=True)
        if found["first_failure"]:
            failed.append(environment.name)
        shutil.rmtree(place)
    return failed


def install(environment: Environment, built: Built, folder: Path) -> Path:
    """Return the Python of a new environment with this torch and the wheel."""
    python = folder / "bin" / "python"
    run(["uv", "venv", "--quiet", "--python", environment.python, str(folder)])
    exact = environment.torch if environment.torch.count(".") == 2 else f"{environment.torch}.*"
    requirements = [f"torch=={exact}", f"lowtide[{environment.extra}] @ {built.wheel.as_uri()}"]
    run(["uv", "pip", "install", "--quiet", "--python", str(python), *requirements, *environment.pinned])
    return python


def unpack(built: Built, folder: Path, without: str = "") -> Path:
    """Return the root of the unpacked sdist, less one folder."""
    with tarfile.open(built.sdist) as archive:
        archive.extractall(folder, filter="data")
    (root,) = folder.iterdir()
    if without:
        shutil.rmtree(root / without)
    return root


def pytest(python: Path, tests: Sequence[str], root: Path, processes: str) -> dict[str, object]:
    """Run tests in the folder, and return how many passed, failed and were skipped."""
    report = root / "report.xml"
    options = ["-n", processes, "-q", "-p", "no:cacheprovider", "-m", MARKS, f"--junitxml={report}"]
    options += ["-W", "ignore:Guards may run slower on Python 3.13.0:RuntimeWarning"]  # torch 2.15's own
    options += ["-W", "ignore:Conversion of an array with ndim:DeprecationWarning"]  # of numpy, to Triton
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
    where = subprocess.run(
        [str(python), "-c", "import lowtide; print(lowtide.__file__)"],
        cwd=root,
        env=clean,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    installed = not (root / "lowtide").exists()
    assert installed == ("site-packages" in where), f"lowtide came from {where}"
    done = subprocess.run([str(python), "-m", "pytest", *options, *tests], cwd=root, env=clean, check=False)
    if not report.exists():
        first = f"pytest exited with {done.returncode}"
        return {"passed": 0, "failed": 0, "skipped": 0, "first_failure": first}
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    total, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    first = next(
        (
            f"{case.get('classname')}::{case.get('name')}"
            for case in suite
            if case.find("failure") is not None or case.find("error") is not None
        ),
        "" if done.returncode == 0 else f"pytest exited with {done.returncode}",
    )
    passed = total - skipped - failed
    return {"passed": passed, "failed": failed, "skipped": skipped, "first_failure": first}


def selftest(python: Path) -> dict[str, object]:
    """Run the calls of `lowtide doctor --selftest`, and return how many are right and wrong."""
    command = [str(python), "-m", "lowtide", "doctor", "--selftest", "--device", "cpu"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    folder = python.parent  # Not the checkout, which Python would import lowtide from.
    done = subprocess.run(command, cwd=folder, env=clean, check=False, capture_output=True, text=True)
    passed = re.findall(r"^ok   .*", done.stdout, flags=re.MULTILINE)
    failed = re.findall(r"^FAIL .*", done.stdout, flags=re.MULTILINE)
    first = failed[0] if failed else "" if done.returncode == 0 else done.stderr.strip().splitlines()[-1]
    return {"passed": len(passed), "failed": len(failed), "skipped": 0, "first_failure": first}


def hf_alone(python: Path) -> dict[str, object]:
    """Run what the page of installation promises of `lowtide[hf]`; return an error's last line."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command, folder = [str(python), "-c", HF_ALONE], python.parent  # Not the checkout.
    done = subprocess.run(command, cwd=folder, env=clean, check=False, capture_output=True, text=True)
    failure = "" if done.returncode == 0 else (done.stderr.strip() or "no message").splitlines()[-1]
    return {"passed": int(not failure), "failed": int(bool(failure)), "first_failure": failure}


def versions(python: Path) -> str:
    """Return the releases that the environment has of what the tests depend on."""
    listed = run(["uv", "pip", "list", "--format", "freeze", "--python", str(python)], capture=True)
    known = dict(line.split("==") for line in listed.splitlines() if "==" in line)
    release = run([str(python), "--version"], capture=True).strip()
    names = ("torch", "triton", "numpy", *FRAMEWORKS)
    return ", ".join([release, *(f"{name} {known[name]}" for name in names if name in known)])


def write(row: dict[str, object]) -> None:
    """Put the row into the table, in place of an earlier one of its environment."""
    key = ("suite", "torch", "python")
    rows = []
    if TABLE.exists():
        with TABLE.open(newline="") as file:
            rows = [each for each in csv.DictReader(file) if any(each[name] != row[name] for name in key)]

    def order(each: dict[str, object]) -> list[object]:
        return [
            [int(part) if part.isdigit() else part for part in str(each[name]).split(".")] for name in key
        ]

    rows = sorted([*rows, row], key=order)
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    with TABLE.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def commit() -> str:
    package = ["--", "lowtide", "tests", "pyproject.toml"]
    changed = run(["git", "-C", str(ROOT), "status", "--porcelain", *package], capture=True)
    return run(["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"], capture=True).strip() + (
        "-dirty" if changed else ""
    )


def run(command: Sequence[str], capture: bool = False) -> str:
    done = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE if capture else None)
    return done.stdout if capture else ""


if __name__ == "__main__":
    main()
