"""What lies around the package: metadata, workflows, and the tables of versions and platforms."""

import csv
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import lowtide
from tests import platforms

ROOT = Path(__file__).parents[1]
DATA = ROOT / "docs" / "_data"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))  # None in an sdist.
NEEDS_CHECKOUT = pytest.mark.skipif(not WORKFLOWS, reason="an sdist has no workflows")


def read(name):
    with (DATA / name).open(newline="") as file:
        return list(csv.DictReader(file))


def environments():
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import environments
    finally:
        sys.path.remove(str(ROOT / "scripts"))
    return environments


def test_one_version_everywhere():
    version = re.escape(lowtide.__version__)
    assert re.search(rf"^version: {version}$", (ROOT / "CITATION.cff").read_text(), flags=re.MULTILINE)
    first = re.search(r"^## (\S+) \((.*)\)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert first[1] == lowtide.__version__
    released = re.findall(r'^date-released: "(.+)"$', (ROOT / "CITATION.cff").read_text(), flags=re.MULTILINE)
    assert released == [] if first[2] == "unreleased" else [first[2]], "of the date"


def test_pythons_and_torches_are_those_declared():
    script, settings = environments(), (ROOT / "pyproject.toml").read_text()
    assert tuple(re.findall(r'"Programming Language :: Python :: (3\.\d+)"', settings)) == script.PYTHONS
    assert f'requires-python = ">={script.PYTHONS[0]}"' in settings
    assert f'dependencies = ["torch>={script.TORCHES[0]}"]' in settings
    pairs = {(each.python, each.torch) for each in script.ENVIRONMENTS}
    every = {(python, torch) for python in script.PYTHONS for torch in script.TORCHES}
    assert (pairs, pairs & script.NOT_BUILT) == (every - script.NOT_BUILT, set())
    first = script.ENVIRONMENTS[: len(script.PYTHONS)]
    assert {each.python for each in first} == {*script.PYTHONS}
    assert {each.torch for each in first} == {*script.TORCHES}


def test_files_of_the_contract_exist():
    for line in (ROOT / "tests" / "contract.txt").read_text().splitlines():
        assert (ROOT / line).exists(), line


def test_table_of_versions():
    script = environments()
    rows = read("versions.csv")
    assert tuple(rows[0]) == script.COLUMNS
    ran = [(row["python"], row["torch"], row["suite"]) for row in rows]
    assert sorted(ran) == sorted((each.python, each.torch, each.suite) for each in script.ENVIRONMENTS)
    # Of the 16 pairs of 4 Pythons and 4 releases, torch has a wheel for all but one.
    assert sum(suite == "contract" for _, _, suite in ran) == 15
    for row in rows:
        assert int(row["passed"]) >= 50
        assert row["versions"].startswith(f"Python {row['python']}.")
        assert f"torch {row['torch']}." in row["versions"]
        assert bool(row["first_failure"]) == (int(row["failed"]) > 0)


def test_row_replaces_that_of_its_environment(tmp_path, monkeypatch):
    script = environments()
    monkeypatch.setattr(script, "TABLE", tmp_path / "versions.csv")
    row = dict.fromkeys(script.COLUMNS, "") | {"python": "3.10", "torch": "2.11", "suite": "contract"}
    for change in ({"passed": 1}, {"torch": "2.9"}, {"python": "3.9"}, {"passed": 2}, {"suite": "selftest"}):
        script.write(row | change)
    with script.TABLE.open(newline="") as file:
        written = [
            (each["suite"], each["torch"], each["python"], each["passed"]) for each in csv.DictReader(file)
        ]
    assert written == [
        ("contract", "2.9", "3.10", ""),
        ("contract", "2.11", "3.9", ""),
        ("contract", "2.11", "3.10", "2"),
        ("selftest", "2.11", "3.10", ""),
    ]


@pytest.mark.extended  # it imports Transformers, in a process of its own
def test_what_the_page_promises_of_hf(plain_environment):
    """Here with every extra; `make test-package` runs it with `lowtide[hf]` alone."""
    pytest.importorskip("transformers", minversion="5")
    program = environments().HF_ALONE
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, env=plain_environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_table_of_builds():
    """What has been compiled of a way on an architecture is whole, and fits."""
    rows = read("builds.csv")
    assert tuple(rows[0]) == platforms.BUILDS
    found = {(row["architecture"], row["way"]): row for row in rows}
    expected = {
        (architecture.name, way.name): len(builds)
        for architecture in platforms.ARCHITECTURES
        for way in platforms.WAYS
        if (builds := platforms.builds_of(way, architecture))
    }
    assert len(found) == len(rows)
    assert {key: int(row["builds"]) for key, row in found.items()} == expected
    for row in rows:
        assert not row["failed"]
        assert 0 < int(row["registers"]) <= 512
        assert int(row["shared_bytes"]) <= int(row["shared_limit"])


def test_table_of_platforms():
    assert read("platforms.csv") == list(platforms.platforms(read("builds.csv")))
    assert {row["status"] for row in read("platforms.csv")} <= {
        *("measured", "measured on an H200", "compiled ahead of time", "interpreted", "tested"),
        *("untested", "checked on a simulated device, never on a real one"),
    }


@NEEDS_CHECKOUT
@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow(path):
    """Actions are pinned by hash with their version beside it; targets exist; none can write."""
    text = path.read_text()
    for action in re.findall(r"uses: (.*)", text):
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", action), action
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"run: make ([a-z-]+)$", text, flags=re.MULTILINE):
        if target == "docs" and not (ROOT / "docs" / "conf.py").exists():
            continue  # There is no site to build yet.
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
    assert "\npermissions:\n  contents: read\n" in text
    yaml = pytest.importorskip("yaml")
    jobs = yaml.safe_load(text)["jobs"]
    assert all(job["steps"] for job in jobs.values())


@NEEDS_CHECKOUT
def test_browser_of_the_workflow(tmp_path):
    """Its step takes archives of these hashes; what site/browser.py seeks is on PATH then."""
    yaml = pytest.importorskip("yaml")
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    (step,) = [each for each in jobs["test"]["steps"] if each.get("env")]
    assert jobs["test"]["strategy"]["matrix"]["target"].count("test-extended") == 1
    assert step["if"] == "matrix.target == 'test-extended'"
    for program in ("bash", "curl", "unzip"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    (tmp_path / "temporary").mkdir()
    environment = {"PATH": os.environ["PATH"], "RUNNER_TEMP": str(tmp_path / "temporary")}
    environment |= {"GITHUB_PATH": str(tmp_path / "path"), "FROM": tmp_path.as_uri()}
    for name, variable in (("chrome", "BROWSER_SHA256"), ("chromedriver", "DRIVER_SHA256")):
        assert re.fullmatch("[0-9a-f]{64}", step["env"][variable])
        archive = tmp_path / f"{name}-linux64.zip"
        with zipfile.ZipFile(archive, "w") as file:
            program = zipfile.ZipInfo(f"{name}-linux64/{name}")
            program.external_attr = 0o755 << 16
            file.writestr(program, "#!/bin/sh\n")
        environment[variable] = hashlib.sha256(archive.read_bytes()).hexdigest()
    script = ["bash", "-e", "-c", step["run"]]
    wrong = environment | {"DRIVER_SHA256": step["env"]["DRIVER_SHA256"]}
    assert subprocess.run(script, env=wrong, capture_output=True, check=False).returncode == 1
    subprocess.run(script, env=environment, capture_output=True, check=True)
    (added,) = (tmp_path / "path").read_text().splitlines()
    assert shutil.which("chromium", path=added)
    assert shutil.which("chromedriver", path=added)


@NEEDS_CHECKOUT
def test_sdist_names_what_git_tracks():
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    tracked = {name.partition("/")[0] for name in listed}
    assert {*environments().source_distribution()} == {name for name in tracked if name[0] != "."}


def test_sdist_has_nothing_else_of_the_working_tree(tmp_path):
    """One that hatchling builds, of a tree with the package's settings and folders beside them."""
    sdist = pytest.importorskip("hatchling.builders.sdist")
    settings = (ROOT / "pyproject.toml").read_text().replace('["readme", "version"]', '["version"]')
    hooks = settings.index("[tool.hatch.metadata.hooks"), settings.index("[tool.ruff]")
    named = {"LICENSE", "README.md", "lowtide/__init__.py", "tests/test_package.py"}
    tree = tmp_path / "tree"
    for name in (*named, ".card/output.txt", ".whl/torch.whl", "runs/model.pt", ".ci/run", "notes.txt"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text('__version__ = "1.0"\n')
    (tree / "pyproject.toml").write_text(settings[: hooks[0]] + settings[hooks[1] :])
    (built,) = sdist.SdistBuilder(str(tree)).build(directory=str(tmp_path / "dist"))
    with tarfile.open(built) as archive:
        found = {name.partition("/")[2] for name in archive.getnames()}
    assert found == {*named, "pyproject.toml", "PKG-INFO"}


@NEEDS_CHECKOUT
def test_citation_is_valid():
    yaml = pytest.importorskip("yaml")
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors", "version"} <= set(found)


@pytest.mark.extended
def test_newest_architectures_compile(plain_environment):
    """One kernel of each way, for the card with the least shared memory and for AMD."""
    pytest.importorskip("triton")
    program = """
import json
from tests import platforms
for target in (120, "gfx942"):
    architecture = next(each for each in platforms.ARCHITECTURES if each.target == target)
    for way in platforms.WAYS:
        for name in platforms.builds_of(way, architecture)[:1]:
            result = way.module.resources(name, way.module.BUILDS[name], target)
            assert 0 < result["registers"] <= 512, result
            assert result["shared"] <= architecture.shared, result
            print(architecture.name, way.name)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=plain_environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 5
