"""A call without a workspace plans how much it holds; these calls have tensors without data.

The plan is tested to be what is held in test_workspace_size.py.

Shapes: N tokens, D features, V classes.
"""

import contextlib
import itertools
import random

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.core.errors import ArgumentError
from lowtide.ops.linear_cross_entropy.operator import planner
from lowtide.ops.linear_cross_entropy.planning import requirements
from lowtide.ops.linear_cross_entropy.planning.division.workspace import DEFAULT_WORKSPACE, OF_ONE_CHUNK
from tests.ops.linear_cross_entropy.planning.division.sizes import size
from tests.support.loss import call_of_sizes

MIB = 1 << 20
OF_A_NUMBER = 256  # bytes of each row, feature and class
HALVES = [torch.bfloat16, torch.float16]

ENGINES = [
    pytest.param("torch", False, id="torch"),
    pytest.param("auto", False, id="triton"),
    pytest.param("auto", True, id="hopper"),
]


@pytest.mark.parametrize(("backend", "hopper"), ENGINES)
def test_plan_within_dense_on_cuda(backend, hopper, monkeypatch):
    if backend == "auto":
        pytest.importorskip("triton")
    monkeypatch.setattr(requirements, "_has_tensor_maps", lambda device: hopper)
    rng = random.Random(1)
    with FakeTensorMode():
        for _ in range(300):
            N, D, V = size(rng, 17), size(rng, 13), size(rng, 18)
            dtype = rng.choice([torch.float32, *HALVES])
            compute_dtype = rng.choice([dtype, dtype, torch.bfloat16])
            wanted = rng.choice([(True, True), (True, False), (False, True), (False, False)])
            options = {"compute_dtype": compute_dtype, "backend": backend}
            call = call_of_sizes(N, D, V, dtype=dtype, wanted=wanted, **options)
            (x,), (w,) = call.head.inputs, call.head.weights
            copies = w.numel() * compute_dtype.itemsize if dtype != compute_dtype else 0
            gradients = x.nbytes * wanted[0] + w.nbytes * wanted[1]
            element = 4 if copies else dtype.itemsize
            dense = max(3 * element * N * V - gradients, compute_dtype.itemsize * N * V)
            if not any(wanted):
                dense = 2 * element * N * V
            held = planner.peak_bytes(call) - copies
            scaled = compute_dtype.itemsize * N * D if 2 * N <= V else 0
            assert held <= dense + OF_ONE_CHUNK["cuda"] + OF_A_NUMBER * (N + D + V) + scaled
            assert held <= DEFAULT_WORKSPACE["cuda"] + 4 * D * V


@pytest.mark.parametrize("log_probs", [False, True])
@pytest.mark.parametrize(("backend", "hopper"), ENGINES)
def test_plan_of_least_sizes_on_cuda(backend, hopper, log_probs, monkeypatch):
    """Without tokens, or with one token, class or feature, a plan fits the workspace."""
    if backend == "auto":
        pytest.importorskip("triton")
    monkeypatch.setattr(requirements, "_has_tensor_maps", lambda device: hopper)
    with FakeTensorMode():
        for N, D, V in itertools.product((0, 1, 2, 300), (1, 8, 192), (1, 2, 7, 1000)):
            for dtype, wanted in itertools.product((torch.float32, *HALVES), (True, False)):
                options = {"dtype": dtype, "wanted": (True, wanted), "log_probs": log_probs}
                for workspace in (None, 8519, 1 << 20):
                    call = call_of_sizes(N, D, V, **options, backend=backend, workspace=workspace)
                    too_small = contextlib.suppress(ArgumentError) if workspace else contextlib.nullcontext()
                    with too_small:
                        plan = planner.make_plan(call)
                        assert planner.peak_bytes(call) <= plan.workspace


def test_large_call_keeps_default(monkeypatch):
    """The default is then what it was: the dense computation would hold far more."""
    with FakeTensorMode():
        for device, whole in (("cpu", 64 * MIB), ("cuda", 1024 * MIB + 4 * 4096 * 128256)):
            call = call_of_sizes(8192, 4096, 128256, device=device, backend="torch")
            assert planner.make_plan(call).workspace == whole


@pytest.mark.parametrize(
    ("N", "D", "V"), [(32, 4096, 1000), (4096, 768, 2), (2048, 4096, 150), (1, 1024, 8000), (100000, 64, 2)]
)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_small_call_chunk_sizes(dtype, N, D, V):
    """Such plans were 10 to 100 times slower than with the whole default."""
    with FakeTensorMode():
        made = planner.make_plan(call_of_sizes(N, D, V, dtype=dtype, device="cpu", backend="torch"))
    assert made.rows >= min(N, max(32, N // 64))
    if made.weight_gradient == "class_blocks":
        assert made.block_rows >= min(N, 32)
        assert made.block_classes >= min(V, 64)
