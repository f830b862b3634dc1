"""Which module may import which: data goes one way, and imports with it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import lowtide

ROOT = Path(lowtide.__file__).parent
OP = "lowtide.linear_cross_entropy"

# What each module of the op may import from lowtide; a new module takes its place here.
ALLOWED = {
    "__init__": {"api"},
    "api": {"check", "entry", "positions", "head"},
    "positions": {"entry", "check", "head", "reference"},
    "entry": {"autograd", "check", "head", "reference", "transforms"},
    "check": {"head"},
    "head": set(),
    "call_memory": {"head"},
    "reference": {"check", "head"},
    "transforms": {"check", "head", "reference", "workspace"},
    "autograd": {"head", "ops", "plan", "route", "scaling", "shapes", "transforms"},
    "shapes": {"call_memory", "head", "ops", "plan", "position_gradients", "route"},
    "ops": {
        "cpu_exponentials",
        "exponentials",
        "gradients",
        "head",
        "loss_rows",
        "operands",
        "plan",
        "position_gradients",
        "route",
        "rows",
        "scaling",
        "streamed",
        "probabilities",
    },
    "plan": {
        "call_memory",
        "class_blocks",
        "head",
        "hopper",
        "layouts",
        "operands",
        "predicted",
        "route",
        "workspace",
    },
    "route": {"check", "cpu_products", "head", "layouts"},
    "layouts": set(),
    "workspace": {"check", "class_blocks", "predicted"},
    "class_blocks": {"predicted"},
    "predicted": set(),
    "loss_rows": {"check", "head", "plan", "rows"},
    "streamed": {
        "gradients",
        "head",
        "kernels",
        "loss_rows",
        "operands",
        "plan",
        "rows",
        "scaling",
        "shared_sum",
    },
    "probabilities": {
        "distance_kernels",
        "distance_pass",
        "distance_pipeline",
        "gradients",
        "hopper",
        "rows",
        "streamed",
        "weight_sums",
    },
    "shared_sum": {"operands"},
    "exponentials": {
        "coefficient_kernels",
        "exponential_rows",
        "exponential_tiles",
        "gradients",
        "linear_term",
        "narrow_term",
        "operands",
        "repair_kernels",
        "row_kernels",
        "rows",
        "weight_sums",
    },
    "exponential_rows": {"linear_term", "rows", "streamed"},
    "linear_term": {
        "gradients",
        "operands",
        "plan",
        "repair_kernels",
        "row_kernels",
        "rows",
        "weight_sums",
    },
    "narrow_term": {"linear_term", "narrow_kernels", "operands"},
    "weight_sums": {"hopper", "operands", "row_kernels", "sum_kernels", "sum_pipeline", "workspace"},
    "gradients": {"head", "plan", "scaling"},
    "cpu_exponentials": {
        "cpu_products",
        "exponential_rows",
        "gradients",
        "operands",
        "rows",
        "scaling",
        "shared_sum",
    },
    "cpu_products": {"compiled_library"},
    "compiled_library": {"private_directory"},
    "private_directory": set(),
    "position_gradients": {"gradients", "head", "route", "scaling"},
    "operands": {"layouts", "predicted"},
    "rows": set(),
    "scaling": {"kernels"},
    "kernels": {"rows"},
    "exponential_tiles": {"exponential_kernels", "exponential_pipeline", "hopper", "pipeline"},
    "exponential_pipeline": {"exponential_kernels", "pipeline"},
    "exponential_kernels": set(),
    "pipeline": set(),
    "hopper": set(),
    "distance_kernels": {"exponential_kernels", "rows"},
    "distance_pass": {"distance_kernels", "exponential_kernels", "rows"},
    "sum_pipeline": {"exponential_kernels", "pipeline", "sum_kernels"},
    "distance_pipeline": {"distance_kernels", "exponential_kernels", "pipeline", "rows"},
    "sum_kernels": {"exponential_kernels"},
    "row_kernels": {"sum_kernels"},
    "repair_kernels": {"exponential_kernels"},
    "narrow_kernels": {"exponential_kernels", "repair_kernels", "workspace"},
    "coefficient_kernels": {"rows"},
}
KERNELS = {
    "kernels",
    "coefficient_kernels",
    "distance_kernels",
    "distance_pass",
    "distance_pipeline",
    "exponential_kernels",
    "exponential_pipeline",
    "exponential_tiles",
    "narrow_kernels",
    "pipeline",
    "repair_kernels",
    "row_kernels",
    "sum_kernels",
    "sum_pipeline",
}


def imported(path):
    """Full names of all modules that a file imports, at its top or inside a function."""
    package = ".".join(("lowtide", *path.relative_to(ROOT).parent.parts))
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(filter(None, (package.rsplit(".", node.level - 1)[0], base)))
            names.add(base)
            folder = ROOT.parent.joinpath(*base.split("."))
            names |= {
                f"{base}.{alias.name}" for alias in node.names if (folder / f"{alias.name}.py").exists()
            }
    return names


def ours(path):
    """Of these, the modules of lowtide, without a package that is named only to reach a module in it."""
    names = {name for name in imported(path) if name.split(".")[0] == "lowtide"}
    return {name for name in names if not any(other.startswith(f"{name}.") for other in names)}


SHARED = {
    f"lowtide.{name}"
    for name in ("derivatives", "layouts", "operators", "rowwise", "soft_cap", "soft_cap_kernels")
}
MODULES = sorted(path for path in (ROOT / "linear_cross_entropy").glob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_imports_of_the_op(path):
    allowed = {f"{OP}.{name}" for name in ALLOWED[path.stem]} | SHARED
    assert ours(path) <= allowed, f"{path.stem} may not import {sorted(ours(path) - allowed)}"


def test_every_module_exists():
    assert {path.stem for path in MODULES} == set(ALLOWED)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_only_kernels_name_triton_at_their_top(path):
    """exponentials.py and probabilities.py may import theirs: they are imported where these will run."""
    top = [
        node for node in ast.parse(path.read_text()).body if isinstance(node, (ast.Import, ast.ImportFrom))
    ]
    names = {alias.name for node in top if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in top if isinstance(node, ast.ImportFrom)}
    assert (path.stem in KERNELS) == any(name.split(".")[0] == "triton" for name in names)


def test_the_rest_of_the_package_stays_out_of_the_op():
    for path in (ROOT / "linear_cross_entropy").rglob("*.py"):
        for other in ("bench", "cli", "train"):
            assert not any(name.startswith(f"lowtide.{other}") for name in imported(path)), path


def test_the_top_imports_the_op_alone():
    assert ours(ROOT / "__init__.py") == {
        OP,
        "lowtide.chunked_loss",
        "lowtide.attention",
        "lowtide.attn_bias",
        "lowtide.deferred",
    }


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
assert not any(name.startswith(("lowtide.tools.bench", "lowtide.cli", "lowtide.train")) for name in sys.modules)
"""


def test_without_triton(plain_environment):
    run = subprocess.run(
        [sys.executable, "-c", FRESH], env=plain_environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "backend='triton' cannot run this call: triton is not installed" in run.stdout
