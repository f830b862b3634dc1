"""What tests of the path without a pass over logits share (test_exponentials.py says how they run).

Importing `everywhere` makes a module's tests run on that path, on the CPU too.
"""

import sys

import pytest
import torch
from torch import Tensor

from lowtide.core import matmul
from lowtide.ops.linear_cross_entropy.engines.exponentials import (
    input_gradient,
    recompute,
    row_coefficients,
    row_log_probs,
    spec,
)
from lowtide.ops.linear_cross_entropy.engines.exponentials.gemm import gemm_triton as kernels
from lowtide.ops.linear_cross_entropy.engines.gemm import triton as tiles
from lowtide.ops.linear_cross_entropy.engines.weight_gradient import (
    accumulators,
    packed_triton,
    row_kernels,
    target_rows,
)
from lowtide.ops.linear_cross_entropy.operator import planner
from lowtide.ops.linear_cross_entropy.planning import memory_model, requirements
from lowtide.ops.linear_cross_entropy.planning.division import cost_model
from tests.support.loss import Inputs, check, differentiate, fused, make_inputs, planned


@pytest.fixture(autouse=True)
def everywhere(device, monkeypatch):
    put_everywhere(device, monkeypatch)


def put_everywhere(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "_slower_than_logits", lambda call, chosen: None)  # few tokens too
    if device == "cuda":
        if torch.cuda.get_device_capability() < (9, 0):
            pytest.skip("needs tensor maps")
        return
    monkeypatch.setattr(requirements, "_has_tensor_maps", lambda device: True)
    monkeypatch.setattr(requirements, "EXPONENTIAL_DTYPES", (torch.float32,))
    for name, size in (("BLOCK_C", 16), ("BLOCK_B", 32), ("BLOCK_D", 16)):
        monkeypatch.setattr(tiles, name, size)
    for module in (matmul, memory_model):
        monkeypatch.setattr(module, "PRODUCT_ROWS", 16)
    monkeypatch.setattr(spec, "PRODUCT_BYTES", 0)
    monkeypatch.setattr(requirements, "SECOND_FEATURES", 16)
    for name, size in (("BLOCK_V", 16), ("BLOCK_D", 32), ("BLOCK_C", 16)):
        monkeypatch.setattr(packed_triton, name, size)
    for name, size in (("BLOCK_V", 16), ("SUMMED_ROWS", 8)):
        monkeypatch.setattr(input_gradient, name, size)
    for name, size in (("DX_TILE", (16, 32)), ("FEWEST_CLASSES_OF_PART", 16)):
        monkeypatch.setattr(cost_model, name, size)
    most_parts = cost_model.most_parts
    monkeypatch.setattr(cost_model, "most_parts", lambda C, D, V, programs=3: most_parts(C, D, V, programs))
    monkeypatch.setattr(input_gradient, "multiprocessors", lambda device: 3)
    prepare = matmul.Operand.__init__

    def prepare_widened(self, input, weight_VD, dtype, *rest):
        prepare(self, input, weight_VD.to(dtype), dtype, *rest)

    monkeypatch.setattr(matmul.Operand, "__init__", prepare_widened)
    multiply = accumulators.product

    def multiply_and_round(out, a, b, *, add=False):
        wide = out if out.dtype == a.dtype else torch.empty_like(out, dtype=a.dtype)
        multiply(wide, a, b, add=add)
        if wide is not out:
            out.copy_(wide)

    monkeypatch.setattr(accumulators, "product", multiply_and_round)


class Silent:
    """A kernel that does nothing. (The interpreter holds the tensors of each one's last launch.)"""

    def __getitem__(self, grid):
        return lambda *arguments, **options: None


@pytest.fixture
def silent(device, everywhere, monkeypatch):
    """On the CPU: tiles as large as on a card, and nothing is computed in them. What is allocated
    does not depend on that."""
    if device == "cuda":
        return
    modules = (kernels, row_coefficients, row_log_probs, recompute, row_kernels, target_rows, packed_triton)
    for module in (*modules, input_gradient):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Silent())
    for name, size in (("BLOCK_C", 128), ("BLOCK_B", 256), ("BLOCK_D", 64)):
        monkeypatch.setattr(tiles, name, size)


def tokens_are_few(monkeypatch, few: bool) -> None:
    """Let any number of tokens be few enough for a single GEMM, or none."""
    monkeypatch.setattr(planner, "FEWEST_CLASSES_PER_TOKEN", 0 if few else 1 << 20)


def kept_plans(monkeypatch, *, few_tokens: bool) -> list:
    """The arguments of each plan that is made, and the plan; any number of tokens is few."""
    tokens_are_few(monkeypatch, few_tokens)
    make, found = planner.make_plan, []

    def kept(*arguments):
        found.append((arguments, make(*arguments)))
        return found[-1][1]

    monkeypatch.setattr(sys.modules["lowtide.ops.linear_cross_entropy.operator.ops"], "make_plan", kept)
    return found


def several_blocks(device: str) -> tuple[int, int]:
    """Tokens and classes of which a small workspace makes several chunks and blocks, the last cut:
    what the interpreter takes is proportional to them."""
    return (80, 203) if device == "cuda" else (37, 139)


def run(inputs: Inputs, *, upstream: Tensor | float = 1.0, factor: float = 2.0, **options) -> None:
    hidden = {"workspace", "logit_scale"}
    plain = {name: value for name, value in options.items() if name not in hidden and value is not None}
    assert planned(inputs, options.get("workspace"), backend="triton", **plain).exponentials
    actual = differentiate(fused, inputs, upstream, backend="triton", **options)
    check(actual, inputs, upstream=upstream, factor=factor, **options)


def dtype_on(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


def with_options(device: str, options: dict, reduction: str, learned: bool, *, D: int) -> tuple:
    """Inputs for these options, the options that are left beside them, and an upstream gradient;
    learned: a bias, and a logit scale in place of a fixed one."""
    inputs = make_inputs(
        D=D,
        V=101,
        device=device,
        dtype=dtype_on(device),
        bias=learned,
        class_weight=True,
        logit_scale=learned,
    )
    if learned:
        options = {name: value for name, value in options.items() if name != "logit_scale"}
    upstream = torch.randn(inputs.leading, device=device) if reduction == "none" else -0.5
    return inputs, options, upstream
