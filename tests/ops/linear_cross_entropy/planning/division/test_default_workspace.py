"""Without a workspace of the caller's, a call holds no more than the dense computation: eager
torch's peak is measured, or on CUDA planned, beside ours.

Shapes: N tokens, D features, V classes, P positions.
"""

import contextlib
import itertools
import random

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import lowtide
from lowtide.core.errors import ArgumentError
from lowtide.memory import peak_memory
from lowtide.ops import distillation
from lowtide.ops.linear_cross_entropy.definition.head import Head, Labels, Options
from lowtide.ops.linear_cross_entropy.operator import planner
from lowtide.ops.linear_cross_entropy.operator.arguments import call_of
from lowtide.ops.linear_cross_entropy.operator.fake import with_new_graph_facts, workspace_of
from lowtide.ops.linear_cross_entropy.planning import requirements
from lowtide.ops.linear_cross_entropy.planning.call_memory import dense_workspace
from lowtide.ops.linear_cross_entropy.planning.division.workspace import (
    DEFAULT_WORKSPACE,
    LEAST_ROOM,
    OF_ONE_CHUNK,
    ROOM,
)
from lowtide.tools.estimate.setting import Dtype, Loss, Setting
from lowtide.tools.estimate.step import estimate
from tests.support.extended import all_extended_but
from tests.support.loss import call_of_sizes, interpreted
from tests.tools.estimate.conftest import TINY_LLAMA, config  # noqa: F401  a fixture

KIB, MIB = 1 << 10, 1 << 20
# Memory that a call may hold above the dense computation: room for enough rows and classes at a
# time, and for vectors and one row of logits, which with few logits are larger than all of these.
SLACK = ROOM["cpu"]
OF_A_NUMBER = {"cpu": 64, "cuda": 256}
HALVES = [torch.bfloat16, torch.float16]


def size(rng, most):
    """As often small as large."""
    return int(2 ** rng.uniform(0, most))


def peak_of(call, leaves):
    def step():
        loss = call()
        if loss.requires_grad:
            loss.sum().backward()

    with peak_memory("cpu") as peak:
        step()
    for leaf in leaves:
        leaf.grad = None
    return peak.bytes


def random_call(rng, log_size, dtypes):
    """Return both computations of a call of random sizes and options, its leaves and N + D + V."""
    N, D, V = (size(rng, log_size) for _ in range(3))
    dtype = rng.choice(dtypes)
    cast = rng.choice([None, None, torch.bfloat16]) if dtype != torch.float64 else None
    wanted = rng.choice([(True, True), (True, True), (True, False), (False, True), (False, False)])
    x, w = (torch.randn(length, D).to(dtype).requires_grad_(grad) for length, grad in zip((N, V), wanted))
    bias = torch.randn(V).to(dtype).requires_grad_(wanted[1]) if rng.random() < 0.3 else None
    weight = torch.rand(V).to(dtype) if rng.random() < 0.2 else None
    soft = rng.random() < 0.15
    target = torch.randn(N, V).softmax(1).to(dtype) if soft else torch.randint(V, (N,))
    options = {
        "reduction": rng.choice(["mean", "mean", "sum", "none"]),
        "label_smoothing": rng.choice([0.0, 0.0, 0.1]),
    }

    def within(function):
        def call():
            with torch.autocast("cpu", cast) if cast else contextlib.nullcontext():
                return function()

        return call

    def dense():
        return F.cross_entropy(F.linear(x, w, bias), target, weight, **options)

    def ours(backend):
        return lowtide.linear_cross_entropy(
            x, w, target, linear_bias=bias, weight=weight, backend=backend, **options
        )

    leaves = [each for each in (x, w, bias) if each is not None and each.requires_grad]
    return within(dense), lambda backend: within(lambda: ours(backend)), leaves, N + D + V


@pytest.mark.parametrize("seed", range(6))
def test_peak_within_dense(seed):
    rng = random.Random(seed)
    for _ in range(40):
        dense, ours, leaves, numbers = random_call(rng, 10, [torch.float32, torch.float64, *HALVES])
        allowed = peak_of(dense, leaves) + SLACK + OF_A_NUMBER["cpu"] * numbers
        assert peak_of(ours("torch"), leaves) <= allowed


@pytest.mark.extended
@pytest.mark.skipif(not interpreted(), reason="on the CPU the kernels run through the interpreter alone")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's
def test_peak_within_dense_triton():
    pytest.importorskip("triton")
    rng = random.Random(0)
    for _ in range(15):
        dense, ours, leaves, numbers = random_call(rng, 7, [torch.float32, *HALVES])
        allowed = peak_of(dense, leaves) + SLACK + OF_A_NUMBER["cpu"] * numbers
        assert peak_of(ours("triton"), leaves) <= allowed


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(
    ("N", "D", "V"),
    all_extended_but(
        [(300, 40, 9000), (300, 300, 9000), (9000, 200, 400)],
        [(300, 40, 9000), (600, 200, 5000), (300, 300, 9000), (9000, 200, 400)],
    ),
)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_peak_below_dense_large_logits(dtype, N, D, V, reduction):
    """Without any slack, also where few tokens' gradients are most of the dense peak."""
    x, w = (torch.randn(length, D).to(dtype).requires_grad_() for length in (N, V))
    target = torch.randint(V, (N,))
    found, most = (
        peak_of(lambda: function(x, w), [x, w])  # noqa: B023
        for function in (
            lambda x, w: lowtide.linear_cross_entropy(x, w, target, reduction=reduction),
            lambda x, w: F.cross_entropy(F.linear(x, w), target, reduction=reduction),
        )
    )
    assert found <= most


@pytest.mark.parametrize("cast", [None, torch.bfloat16])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    ("N", "D", "V"), [(256, 8, 2048), (256, 1024, 256), (2048, 256, 256), (32, 512, 2048)]
)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_dense_peak_prediction(dtype, N, D, V, grad, cast):
    """It holds that at least, and not much more where nothing is cast."""
    x, w = (torch.randn(length, D).to(dtype).requires_grad_(grad) for length in (N, V))
    target = torch.randint(V, (N,))

    def dense():
        with torch.autocast("cpu", cast, enabled=cast is not None):
            return F.cross_entropy(F.linear(x, w), target)

    options, grads = Options(compute_dtype=cast or dtype), (grad, grad, False, False)
    said = dense_workspace(call_of(Head((x,), (w,)), Labels(target), grads, options, log_probs=False))
    gradients = (x.nbytes + w.nbytes) * grad
    measured = peak_of(dense, [x, w]) - gradients
    assert said <= measured
    if cast is None and dtype == torch.float32:  # products of halves may hold a copy
        assert measured <= said + 16


# On CUDA, of tensors without data: the plan is tested to be what is held (test_workspace_size.py).

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
            assert held <= dense + OF_ONE_CHUNK["cuda"] + OF_A_NUMBER["cuda"] * (N + D + V)
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


NEEDS_GRAD = 4 + len(Labels._fields)  # the place of this argument of the operator


def arguments(workspace, N=40, D=8, V=100):
    head = [[torch.randn(N, D)], [torch.randn(V, D)], None, None]
    options = Options(workspace=workspace, backend="torch")
    return [*head, *Labels(torch.randint(V, (N,))), (True, True, False, False), *options]


def test_workspace_of_caller_kept():
    call = with_new_graph_facts("lowtide::linear_cross_entropy", arguments(5 * MIB))
    head = Head((call[0][0],), (call[1][0],))
    labels, options = Labels(*call[4:NEEDS_GRAD]), Options(*call[NEEDS_GRAD + 1 :])
    planned = call_of(head, labels, call[NEEDS_GRAD], options, log_probs=False)
    assert planner.make_plan(planned).workspace == 5 * MIB


def test_graph_facts_of_other_device():
    """None stays None, so that the other device's default is its own."""
    told = with_new_graph_facts("lowtide::linear_cross_entropy", arguments(None))
    assert Options(*told[NEEDS_GRAD + 1 :]).workspace is None
    with FakeTensorMode(allow_non_fake_inputs=True):
        there = list(told)
        for place in (0, 1):
            there[place] = [torch.empty(told[place][0].shape, device="cuda")]
        there[4] = torch.empty(told[4].shape, dtype=torch.long, device="cuda")
        again = with_new_graph_facts("lowtide::linear_cross_entropy", there)
        assert LEAST_ROOM["cpu"] < workspace_of("lowtide::linear_cross_entropy", again)


def test_graph_keeps_default():
    """There N may be a symbol."""
    seen = []

    def backend(graph, inputs):
        for node in graph.graph.nodes:
            if node.target is torch.ops.lowtide.linear_cross_entropy.default:
                seen.append(Options(*node.args[NEEDS_GRAD + 1 :]))
        return graph.forward

    x, w, target = torch.randn(40, 8), torch.randn(100, 8), torch.randint(100, (40,))
    torch.compile(lowtide.linear_cross_entropy, backend=backend, fullgraph=True)(x, w, target)
    torch.compiler.reset()
    assert [(each.dense, each.workspace) for each in seen] == [(None, None)]


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_positions_within_dense(reduction, dtype):
    """The dense computation has the logits of all at once."""
    N, D, V, P = 256, 32, 512, 3
    x, w = (torch.randn(shape).to(dtype).requires_grad_() for shape in ((N, D), (V, P, D)))
    target = torch.randint(V, (N, P))

    def dense():
        logits = F.linear(x, w.flatten(0, 1)).view(N, V, P)
        return F.cross_entropy(logits, target, reduction=reduction)

    def ours():
        return lowtide.linear_cross_entropy(x, w, target, reduction=reduction)

    assert peak_of(ours, [x, w]) <= peak_of(dense, [x, w])


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize(
    ("N", "D", "V"), all_extended_but([(300, 40, 9000)], [(300, 40, 9000), (600, 200, 5000)])
)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_log_probs_within_dense(dtype, N, D, V, entropy):
    x, w = (torch.randn(length, D).to(dtype).requires_grad_() for length in (N, V))
    target = torch.randint(V, (N,))

    def dense():
        log_prob_NV = F.linear(x, w).log_softmax(1)
        picked_N = log_prob_NV.gather(1, target[:, None])[:, 0]
        return picked_N - (log_prob_NV.exp() * log_prob_NV).sum(1) if entropy else picked_N

    def ours():
        found = lowtide.linear_log_probs(x, w, target)
        return found.log_prob + found.entropy if entropy else found.log_prob

    assert peak_of(ours, [x, w]) <= peak_of(dense, [x, w])


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jensen_shannon"])
@pytest.mark.parametrize("seed", range(2))
def test_distillation_within_dense(seed, divergence, grad):
    rng = random.Random(seed)
    for _ in range(15):
        N, D, V = size(rng, 9), size(rng, 9), size(rng, 10)
        dtype = rng.choice([torch.float32, *HALVES])
        x, w = (torch.randn(length, D).to(dtype).requires_grad_(grad) for length in (N, V))
        teacher = torch.randn(N, D).to(dtype), torch.randn(V, D).to(dtype)

        def dense(x=x, w=w, teacher=teacher):
            """Forward KL: what the others hold is more."""
            s_NV, t_NV = (F.linear(*head).log_softmax(1) for head in ((x, w), teacher))
            return F.kl_div(s_NV, t_NV, log_target=True, reduction="batchmean")

        def ours(x=x, w=w, teacher=teacher):
            return getattr(distillation, divergence)(x, w, *teacher)

        allowed = peak_of(dense, [x, w]) + SLACK + OF_A_NUMBER["cpu"] * (N + D + V)
        assert peak_of(ours, [x, w]) <= allowed


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "dtype", all_extended_but([Dtype.bfloat16], [Dtype.bfloat16, Dtype.autocast, Dtype.float32])
)
@pytest.mark.parametrize(
    ("classes", "length"), all_extended_but([(1000, 128), (8192, 64)], [(1000, 16), (1000, 128), (8192, 64)])
)
def test_estimate_of_small_model(config, classes, length, dtype, device):  # noqa: F811
    pytest.importorskip("transformers")
    setting = Setting(config(TINY_LLAMA, vocab_size=classes), 1, length, dtype)
    eager, ours = (estimate(setting, loss, device).peak for loss in (Loss.eager, Loss.lowtide))
    few = length * classes * 2 < 1 << 16
    assert ours <= eager + few * ROOM[device]


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
