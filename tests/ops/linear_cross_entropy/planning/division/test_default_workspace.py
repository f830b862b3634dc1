"""Without a workspace of the caller's, a call holds no more than the dense computation: eager
torch's peak is measured beside ours. Plans for CUDA are in test_default_plans.py.

Shapes: N tokens, D features, V classes, P positions.
"""

import contextlib
import random

import pytest
import torch
import torch.nn.functional as F

import lowtide
from lowtide.memory import peak_memory
from lowtide.ops import distillation
from lowtide.ops.linear_cross_entropy.definition.head import Head, Labels, Options
from lowtide.ops.linear_cross_entropy.operator.arguments import call_of
from lowtide.ops.linear_cross_entropy.planning.call_memory import dense_workspace
from lowtide.ops.linear_cross_entropy.planning.division.workspace import ROOM
from tests.ops.linear_cross_entropy.planning.division.sizes import size
from tests.support.extended import all_extended_but
from tests.support.loss import interpreted

# Memory that a call may hold above the dense computation: room for enough rows and classes at a
# time, and for vectors and one row of logits, which with few logits are larger than all of these.
SLACK = ROOM["cpu"]
OF_A_NUMBER = 64
HALVES = [torch.bfloat16, torch.float16]


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
        allowed = peak_of(dense, leaves) + SLACK + OF_A_NUMBER * numbers
        assert peak_of(ours("torch"), leaves) <= allowed


@pytest.mark.extended
@pytest.mark.skipif(not interpreted(), reason="on the CPU the kernels run through the interpreter alone")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's
def test_peak_within_dense_triton():
    pytest.importorskip("triton")
    rng = random.Random(0)
    for _ in range(15):
        dense, ours, leaves, numbers = random_call(rng, 7, [torch.float32, *HALVES])
        allowed = peak_of(dense, leaves) + SLACK + OF_A_NUMBER * numbers
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

        allowed = peak_of(dense, [x, w]) + SLACK + OF_A_NUMBER * (N + D + V)
        assert peak_of(ours, [x, w]) <= allowed
