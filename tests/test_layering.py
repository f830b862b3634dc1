"""Imports go down the folders, and no folder imports one that imports it."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import lowtide

ROOT = Path(lowtide.__file__).parent
# From the bottom up. A folder may import those of its own line and of the lines before it.
LAYERS = (
    {"core"},
    {"ops"},
    {"losses", "deferred", "distributed"},
    {"integrations"},
    {"tools"},
    {"cli"},
)
# An operator imports no other; but these use the engines of the loss.
ON_THE_LOSS = {"distillation", "chunked_loss"}
# Names of the package itself, which is above the operators and below the tools.
PUBLIC = {path.stem for path in ROOT.glob("*.py")}
DEEPEST = 10

MODULES = sorted(ROOT.rglob("*.py"))


def name_of(path):
    parts = ("lowtide", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {name_of(path): path for path in MODULES}


@cache
def imported(name, *, at_the_top=False):
    """The modules of lowtide that a module imports: at its top, or inside functions as well."""
    tree = ast.parse(NAMES[name].read_text())
    found = set()
    for node in _run_at_import(tree) if at_the_top else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: a relative import"
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= full & NAMES.keys() or {node.module}
    return {each for each in found if each in NAMES} | {each for each in found if each == "triton"}


def _run_at_import(tree):
    """All nodes but those of functions, and of what is for type checkers."""
    nodes = [*tree.body]
    while nodes:
        node = nodes.pop()
        yield node
        checks_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if not checks_types and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            nodes += ast.iter_child_nodes(node)


def folder(name):
    return name if NAMES[name].name == "__init__.py" else name.rpartition(".")[0]


def layer(name):
    top = name.split(".")[1] if "." in name else ""
    return next((height for height, names in enumerate(LAYERS) if top in names), None)


@pytest.mark.parametrize("name", [name for name in NAMES if layer(name) is not None])
def test_imports_go_down(name):
    for other in imported(name) & NAMES.keys():
        if layer(other) is not None:
            assert layer(other) <= layer(name), f"{name} imports {other}, which is above it"
        elif layer(name) <= layer("lowtide.deferred"):
            pytest.fail(f"{name} imports {other}, which is made of it")


def test_operators_are_apart():
    for name in NAMES:
        for other in imported(name):
            mine, others = (each.split(".")[2] for each in (f"{name}...", f"{other}..."))
            if name.startswith("lowtide.ops.") and other.startswith("lowtide.ops.") and mine != others:
                assert mine in ON_THE_LOSS, f"{name}: {other}"
                assert others == "linear_cross_entropy", f"{name}: {other}"


def test_engines_are_apart():
    """Each derives from the base engine alone, or for a sharded head from that beside it;
    operator/ops.py makes one of them."""
    engines = {name for name in NAMES if ".engines." in name and name.endswith("engine")}
    engines -= {f"lowtide.ops.linear_cross_entropy.engines.{base}" for base in ("engine", "loss_engine")}
    sharded = {name for name in engines if name.endswith(".sharded_engine")}
    assert len(engines - sharded) == 4
    for name in NAMES:
        if ".engines." in name:
            beside = {name.replace(".sharded_engine", ".engine")} if name in sharded else set()
            assert imported(name) & engines == beside, name


def folders():
    """What each folder imports; the package itself, whose names are public, is left out."""
    graph = {folder(name): set() for name in NAMES}
    for name in NAMES:
        graph[folder(name)] |= {folder(other) for other in imported(name) & NAMES.keys()} - {folder(name)}
    del graph["lowtide"]
    return {name: others & graph.keys() for name, others in graph.items()}


def chains(graph):
    """The length of the longest chain from each on."""
    lengths, at_work = {}, set()

    def length(name):
        assert name not in at_work, f"{sorted(at_work)} import each other"
        if name not in lengths:
            at_work.add(name)
            lengths[name] = 1 + max(map(length, graph[name]), default=0)
            at_work.remove(name)
        return lengths[name]

    return {name: length(name) for name in graph}


def test_no_folder_imports_one_that_imports_it():
    chains(folders())


def test_the_chain_of_packages_is_short():
    """A package is a folder of lowtide, of ops or of tools, with all that is in it."""

    def package(name):
        depth = 3 if name.startswith(("lowtide.ops.", "lowtide.tools.")) else 2
        return ".".join(name.split(".")[:depth])

    graph = {package(name): set() for name in folders()}
    for name, others in folders().items():
        graph[package(name)] |= {package(other) for other in others} - {package(name)}
    assert max(chains(graph).values()) <= DEEPEST


def test_the_chain_of_modules_below_the_loss_is_short():
    graph = {name: imported(name, at_the_top=True) & NAMES.keys() for name in NAMES}
    for name in ("api", "log_probs"):
        assert chains(graph)[f"lowtide.ops.linear_cross_entropy.{name}"] <= DEEPEST


def test_folders_are_small():
    for path in {path.parent for path in MODULES}:
        assert len([*path.glob("*.py")]) <= 14, path


@pytest.mark.parametrize("package", sorted(name for name, path in NAMES.items() if path.stem == "__init__"))
def test_docstring_of_a_package_names_its_parts(package):
    """Its modules and packages, each at the beginning of a line, or in backticks."""
    parts = {name.rpartition(".")[2] for name in NAMES if name.rpartition(".")[0] == package}
    text = ast.get_docstring(ast.parse(NAMES[package].read_text()))
    assert not parts - {*re.findall(r"(?:^[ *]*|`)(\w+)", text, re.MULTILINE)}


def test_no_name_is_a_function_and_a_package():
    for name in lowtide.__all__:
        assert not callable(getattr(lowtide, name)) or f"lowtide.{name}" not in NAMES, name


def test_no_two_classes_have_one_name():
    """A reader who looks one up finds one. Private ones, and those within functions, count too."""
    modules = {}
    for name, path in NAMES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                modules.setdefault(node.name, []).append(name)
    assert not {name: found for name, found in modules.items() if len(found) > 1}


def test_triton_is_imported_when_a_kernel_is_needed():
    """Its files are reached from inside functions alone."""
    kernels = {name for name in NAMES if any(_names_triton(NAMES[name]))}
    assert len(kernels) > 20
    reached, new = set(), {"lowtide"}
    while new:
        reached |= new
        new = {other for name in new for other in imported(name, at_the_top=True)} & NAMES.keys() - reached
    assert not kernels & reached


def _names_triton(path):
    for node in _run_at_import(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "triton")
        elif isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "triton":
            yield node.module


FRESH = """
import sys
sys.modules["triton"] = None
import torch, lowtide
assert "torch._dynamo" not in sys.modules, "takes as long as torch itself"
x, w = torch.randn(5, 3, requires_grad=True), torch.randn(7, 3, requires_grad=True)
target = torch.randint(7, (5,))
loss = lowtide.linear_cross_entropy(x, w, target)
loss.backward()
torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(x @ w.t(), target))
assert x.grad.isfinite().all() and w.grad.isfinite().all()
try:
    lowtide.linear_cross_entropy(x, w, target, backend="triton")
except ValueError as error:
    print(error)
for name in ("typer", "rich", "matplotlib", "tokenizers", "transformers"):
    assert name not in sys.modules, name
assert not any(name.startswith(("lowtide.tools", "lowtide.cli")) for name in sys.modules)
"""


def test_without_triton(plain_environment):
    run = subprocess.run(
        [sys.executable, "-c", FRESH], env=plain_environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "backend='triton' cannot run this call: triton is not installed" in run.stdout
