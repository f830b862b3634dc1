"""Which module of attention may import which: data goes one way, and imports with it."""

import ast
from pathlib import Path

import pytest

import lowtide
from tests.test_layering import ours

FOLDER = Path(lowtide.__file__).parent / "attention"
OP = "lowtide.attention"

# What each module may import from its neighbours; a new module takes its place here.
ALLOWED = {
    "__init__": {"api", "merge"},
    "api": {"check", "entry", "layouts", "masks", "problem"},
    "merge": {"check"},
    "entry": {"autograd", "check", "handed", "masks", "problem", "reference", "transforms"},
    "choice": {"check", "engines", "entry", "masks", "problem"},
    "layouts": {"check"},
    "check": {"masks", "problem"},
    "masks": set(),
    "problem": set(),
    "handed": {"addresses", "autograd", "masks", "problem", "sdpa"},
    "sdpa": {"addresses", "check", "problem"},
    "addresses": set(),
    "reference": {"dropout", "masks", "problem"},
    "transforms": {"dropout", "masks", "problem", "reference"},
    "autograd": {"engines", "ops", "problem", "shapes", "transforms"},
    "shapes": {"chunk", "ops", "problem"},
    "ops": {"engines", "problem"},
    "engines": {"blockwise", "blockwise_backward", "check", "launch", "launch_backward", "problem", "sdpa"},
    "blockwise": {"chunk", "dropout", "problem", "tiles"},
    "blockwise_backward": {"blockwise", "chunk", "problem", "tiles"},
    "chunk": set(),
    "tiles": {"problem"},
    "dropout": set(),
    "launch": {"blocks", "chunk", "dropout", "dropout_kernel", "forward_kernels", "pieces", "problem"},
    "launch_backward": {
        *("backward_kernels", "blocks", "chunk", "grad_scores", "grad_scores_kernels", "launch", "pieces"),
        "problem",
    },
    "blocks": set(),
    "pieces": {"blocks"},
    "forward_kernels": {"pieces", "tile_kernels"},
    "backward_kernels": {"pieces", "tile_kernels"},
    "grad_scores": {"blocks", "pieces", "problem"},
    "grad_scores_kernels": {"backward_kernels", "pieces", "tile_kernels"},
    "dropout_kernel": {"dropout"},
    "tile_kernels": set(),
}
# Written in Triton: imported only where a call runs them, as are those that launch them.
TRITON = {
    *("forward_kernels", "backward_kernels", "grad_scores_kernels", "dropout_kernel"),
    *("tile_kernels", "pieces"),
}
OUTSIDE = {
    "lowtide.core.autodiff",
    "lowtide.core.operator",
    "lowtide.core.row_function",
    "lowtide.core.soft_cap",
    "lowtide.core.triton_helpers",
    "lowtide.ops.linear_cross_entropy.definition.validation",
    "lowtide.core.matmul",
}
MODULES = sorted(FOLDER.glob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_imports(path):
    allowed = {f"{OP}.{name}" for name in ALLOWED[path.stem]} | OUTSIDE
    assert ours(path) <= allowed, f"{path.stem} may not import {sorted(ours(path) - allowed)}"


def test_every_module_exists():
    assert {path.stem for path in MODULES} == set(ALLOWED)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_only_kernels_name_triton_at_their_top(path):
    nodes = ast.parse(path.read_text()).body
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    assert (path.stem in TRITON) == any(name.split(".")[0] == "triton" for name in names)
