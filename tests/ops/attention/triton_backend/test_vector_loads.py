"""Kernels are told what divides features and rows, and read the same numbers with it."""

import pytest
import torch

from lowtide import memory_efficient_attention
from tests.ops.attention.helpers import INTERPRETED
from tests.support.loss import skip_unless_runnable
from tests.support.restored import LAYOUTS

pytest.importorskip("triton")

from lowtide.ops.attention import remembered
from lowtide.ops.attention.triton_backend import launch

pytestmark = INTERPRETED

HALF = torch.bfloat16


@pytest.mark.parametrize(
    ("shape", "step"),
    [((2, 5, 3, 72), 8), ((2, 5, 3, 36), 4), ((2, 5, 3, 38), 2), ((2, 5, 3, 33), 1), ((2, 5, 3, 24), 8)],
)
def test_step_of_features(shape, step):
    assert launch.step_of([torch.empty(shape, dtype=HALF), None], shape[-1]) == step


@pytest.mark.parametrize(
    ("offset", "width", "step"), [(0, 80, 8), (8, 80, 8), (4, 80, 4), (1, 80, 1), (0, 76, 4), (0, 73, 1)]
)
def test_step_of_rows(offset, width, step):
    """Rows of 72 features, `width` apart, that begin `offset` numbers after an aligned address."""
    numbers = torch.empty(16 + 2 * 5 * width, dtype=HALF)
    rows = numbers.as_strided((2, 1, 5, 72), (5 * width, 7, width, 1), offset)  # one head: any stride
    assert rows.data_ptr() % 16 == 2 * offset % 16
    assert launch.step_of([rows], 72) == step


@pytest.mark.parametrize("K", [24, 36, 72])
@pytest.mark.parametrize("bias", [None, (1, 2, 20, 1), (2, 2, 20, 17)])
def test_values_do_not_depend_on_step(monkeypatch, device, K, bias):
    """On a card delta is summed in the order of threads that load it; dq and dk move with it."""
    skip_unless_runnable("triton", device)
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(2, rows, 2, K, device=device, dtype=HALF).requires_grad_() for rows in (20, 17, 17)
    )
    leaves = [query, key, value]
    if bias is not None:
        leaves.append(torch.randn(bias, device=device, dtype=HALF).requires_grad_())

    def results():
        out = memory_efficient_attention(*leaves[:3], *leaves[3:], backend="triton")
        return out, *torch.autograd.grad(out.float().square().sum(), leaves)

    found = results()
    monkeypatch.setattr(launch, "VECTOR", 1)
    most = 0 if device == "cpu" else 2e-3
    for one, other in zip(found, results()):
        assert (one - other).float().norm() <= most * other.float().norm()


@pytest.mark.parametrize(("shape", "gap", "K", "dtype"), [
    ((2, 2, 70, 76), 0, 32, HALF),
    ((1, 2, 70, 76), 0, 32, HALF),  # shared by batches
    ((2, 2, 70, 76), 4, 32, HALF),  # rows of 80 numbers
    ((2, 1, 1, 76), 0, 32, HALF),
    ((132, 2, 20, 20), 0, 32, HALF),  # problems of one tile
    ((1, 2, 70, 80), 4, 32, HALF),  # 16 divides the keys, but not the 84 numbers of a row
    ((2, 2, 3, 1028), 0, 32, HALF),  # few queries
    ((2, 2, 20, 76), 0, 272, HALF),  # stored scores
    ((2, 2, 20, 76), 0, 32, torch.float32),
    ((1, 2, 20, 76), 0, 32, torch.float32),
])  # fmt: skip
def test_values_do_not_depend_on_step_of_bias(monkeypatch, device, shape, gap, K, dtype):
    skip_unless_runnable("triton", device)
    torch.manual_seed(0)
    M, N = (70 if shape[2] == 1 else shape[2]), shape[3]
    leaves = [
        torch.randn(max(2, shape[0]), rows, 2, K, device=device, dtype=dtype).requires_grad_()
        for rows in (M, N, N)
    ]
    wide = torch.randn(*shape[:3], N + gap, device=device, dtype=dtype)
    bias = wide[..., :N].requires_grad_()
    assert launch.step_of([bias], N) == 4

    def results():
        out = memory_efficient_attention(*leaves, bias, backend="triton")
        return out, *torch.autograd.grad(out.float().square().sum(), [*leaves, bias])

    found = results()
    monkeypatch.setattr(launch, "VECTOR", 1)
    assert launch.step_of([bias], N) == 1
    remembered.forget()
    # On a card float32 may differ in last bits: a compiler may sum a tile in another order.
    most = 1e-6 if device == "cuda" and dtype == torch.float32 else 0
    for one, other in zip(found, results()):
        assert (one - other).float().norm() <= most * other.float().norm()


@pytest.mark.parametrize("layout", ["transposed", "padded", "moved"])
@pytest.mark.parametrize("which", range(6))
def test_one_saved_tensor_in_other_strides(device, which, layout):
    """Its step is not that of the others: of query, key, value, result, low half, statistics."""
    skip_unless_runnable("triton", device)
    torch.manual_seed(0)
    leaves = [
        torch.randn(2, rows, 2, 24, device=device, dtype=torch.float16).requires_grad_()
        for rows in (20, 17, 17)
    ]
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return LAYOUTS[layout](tensor) if len(saved) == which + 1 else tensor

    def gradients():
        out = memory_efficient_attention(*leaves, backend="triton")
        return torch.autograd.grad(out, leaves, 2 * out.detach())

    expected = gradients()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        found = gradients()
    assert len(saved) > which
    for one, other in zip(found, expected):
        assert (one - other).float().norm() <= 2e-3 * other.float().norm()
