"""A call without rows, or with none that counts: every gradient is zero, in every engine and dtype.

torch's deterministic mode fills the memory of each tensor that an operator makes with NaN, so that
a sum which nothing was put into shows. A rank with an empty batch would hand it on to all the
others.

Shapes: N rows, D features, V classes, P positions; B sequences, M queries, H heads, K features of
each.
"""

import functools

import pytest
import torch
import torch.nn.functional as F

import lowtide
from lowtide.core.bfloat16_units import gemm
from lowtide.ops.linear_cross_entropy.planning import requirements
from tests.support.loss import skip_unless_runnable, smallest_workspace

D, V, P = 5, 33, 3
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
REDUCTIONS = ["mean", "sum", "none"]
BACKENDS = ["torch", "triton", "reference"]

every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)
every_backend = pytest.mark.parametrize("backend", BACKENDS)
with_and_without = pytest.mark.parametrize("N", [0, 7], ids=["no rows", "all ignored"])


@pytest.fixture(autouse=True)
def _fresh_memory_is_nan(device):
    assert torch.utils.deterministic.fill_uninitialized_memory
    # On CUDA torch would ask for a setting of cuBLAS: there the fixture of conftest.py has to do.
    torch.use_deterministic_algorithms(device == "cpu")
    yield
    torch.use_deterministic_algorithms(False)


def leaf(*shape, device, dtype):
    return torch.randn(shape).to(device, dtype).requires_grad_()


def check_zero(loss, leaves):
    for each, gradient in zip(leaves, torch.autograd.grad(loss.sum(), leaves)):
        assert torch.equal(gradient, torch.zeros_like(each)), gradient


def check(call, leaves, *, limited=True):
    """`call` of a workspace: the default one, and some that cut rows and classes in every way."""
    check_zero(call(None), leaves)
    if limited:
        least = smallest_workspace(call)
        for workspace in (least, least * 5 // 4, 2 * least, 4 * least, 16 * least):
            check_zero(call(workspace), leaves)


@with_and_without
@every_dtype
@every_reduction
@every_backend
@pytest.mark.parametrize("everything", [False, True])
def test_loss(device, backend, reduction, dtype, N, everything):
    skip_unless_runnable(backend, device, dtype)
    input, weight = leaf(N, D, device=device, dtype=dtype), leaf(V, D, device=device, dtype=dtype)
    options, more = {}, ()
    if everything:
        more = leaf(V, device=device, dtype=dtype), torch.tensor(0.7).to(device, dtype).requires_grad_()
        options = {"linear_bias": more[0], "logit_scale": more[1]}
        options |= {"label_smoothing": 0.1, "z_loss": 0.1, "softcap": 3.0}
    target = torch.full((N,), -100, device=device)

    def call(workspace):
        options.update(workspace=workspace, backend=backend, reduction=reduction)
        return lowtide.linear_cross_entropy(input, weight, target, **options)

    check(call, (input, weight, *more), limited=backend != "reference")


@with_and_without
@every_reduction
def test_loss_on_units_for_bfloat16(monkeypatch, reduction, N):
    if not gemm.available():
        pytest.skip("this CPU has no units for bfloat16, or there is no compiler")
    monkeypatch.setattr(requirements, "FEWEST_WEIGHTS", 0)
    shapes = (N, D), (V, D), (V,)
    input, weight, bias = (leaf(*shape, device="cpu", dtype=torch.bfloat16) for shape in shapes)
    target, options = torch.full((N,), -100), {"linear_bias": bias, "reduction": reduction}
    call = functools.partial(lowtide.linear_cross_entropy, input, weight, target, **options)
    check(lambda workspace: call(workspace=workspace), (input, weight, bias))


@every_dtype
@every_reduction
@every_backend
def test_loss_of_probabilities(device, backend, reduction, dtype):
    skip_unless_runnable(backend, device, dtype)
    input, weight, bias = (leaf(*shape, device=device, dtype=dtype) for shape in ((0, D), (V, D), (V,)))
    target = torch.zeros(0, V, device=device, dtype=dtype)

    def call(workspace):
        options = {"workspace": workspace, "backend": backend, "reduction": reduction}
        return lowtide.linear_cross_entropy(input, weight, target, linear_bias=bias, **options)

    check(call, (input, weight, bias), limited=backend != "reference")


@with_and_without
@every_dtype
@every_reduction
@every_backend
def test_loss_of_several_positions(device, backend, reduction, dtype, N):
    skip_unless_runnable(backend, device, dtype)
    input, weight = leaf(N, D, device=device, dtype=dtype), leaf(V, P, D, device=device, dtype=dtype)
    target = torch.full((N, P), -100, device=device)

    def call(workspace):
        options = {"workspace": workspace, "backend": backend, "reduction": reduction}
        return lowtide.linear_cross_entropy(input, weight, target, **options)

    check(call, (input, weight), limited=backend != "reference")


@with_and_without
@every_dtype
@every_backend
def test_log_probs(device, backend, dtype, N):
    skip_unless_runnable(backend, device, dtype)
    input, weight, bias = (leaf(*shape, device=device, dtype=dtype) for shape in ((N, D), (V, D), (V,)))
    target = torch.full((N,), -100, device=device)

    def call(workspace):
        options = {"workspace": workspace, "backend": backend}
        found = lowtide.linear_log_probs(input, weight, target, linear_bias=bias, **options)
        return found.log_prob + found.entropy + found.logsumexp

    check(call, (input, weight, bias), limited=backend != "reference")


@with_and_without
@every_dtype
@every_reduction
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jensen_shannon"])
def test_distillation(device, divergence, softcap, reduction, dtype, N):
    shapes = (N, D), (V, D), (V,)
    input, weight, bias = (leaf(*shape, device=device, dtype=dtype) for shape in shapes)
    teacher = (torch.randn(shape).to(device, dtype) for shape in ((N, 3), (V, 3)))
    options = {"student_bias": bias, "student_softcap": softcap, "reduction": reduction}
    options |= {"ignored": torch.ones(N, dtype=torch.bool, device=device)} if N else {}
    function = getattr(lowtide.distillation, divergence)
    call = functools.partial(function, input, weight, *teacher, **options)
    check(lambda workspace: call(workspace=workspace), (input, weight, bias))


@with_and_without
@every_dtype
@pytest.mark.parametrize("mode", ["gradient_in_forward", "recompute"])
@pytest.mark.parametrize("size", [{"chunk_size": 3}, {"workspace": 1 << 16}], ids=str)
def test_chunked_loss(device, size, mode, dtype, N):
    head, input = torch.nn.Linear(D, V).to(device, dtype), leaf(N, D, device=device, dtype=dtype)
    target = torch.full((N,), -100, device=device)
    for reduction in ("sum", "none") if mode == "recompute" else ("sum",):
        loss_fn = functools.partial(F.cross_entropy, reduction=reduction)
        loss = lowtide.chunked_loss(loss_fn, head, input, target, mode=mode, **size)
        check_zero(loss, (input, *head.parameters()))


@every_dtype
@pytest.mark.parametrize("backend", ["auto", "triton", "torch", "reference"])
@pytest.mark.parametrize(("B", "M", "N"), [(0, 3, 4), (2, 0, 4), (2, 3, 0)], ids=["none", "M = 0", "N = 0"])
def test_attention(device, B, M, N, backend, dtype):
    """Where there are no queries, or no keys."""
    skip_unless_runnable(backend, device, dtype)
    query, key, value = (leaf(B, length, 2, 8, device=device, dtype=dtype) for length in (M, N, N))
    bias = leaf(B, 2, M, N, device=device, dtype=dtype)
    for given in (None, bias):
        out = lowtide.memory_efficient_attention(query, key, value, given, backend=backend)
        assert not out.any()
        check_zero(out, (query, key, value) if given is None else (query, key, value, bias))


@every_dtype
def test_losses_of_embeddings_and_policies(device, dtype):
    input, weight = leaf(2, 0, D, device=device, dtype=dtype), leaf(V, D, device=device, dtype=dtype)
    target = torch.full((2, 0), -100, device=device)
    for loss in (lowtide.losses.z_loss, lowtide.losses.sequence_log_probs):
        check(lambda workspace, loss=loss: loss(input, weight, target, workspace=workspace), (input, weight))
    query, key = leaf(0, D, device=device, dtype=dtype), leaf(V, D, device=device, dtype=dtype)
    info_nce = functools.partial(lowtide.losses.info_nce, query, key, logit_scale=2.0)
    check(lambda workspace: info_nce(workspace=workspace), (query, key))


MAPPED = {
    "attention": lambda x: lowtide.memory_efficient_attention(
        x[None, :, None], *[torch.ones(1, 3, 1, D)] * 2
    ),
    "distillation": lambda x: lowtide.distillation.forward_kl(x, torch.ones(V, D), x, torch.ones(V, D)),
    "loss": lambda x: lowtide.linear_cross_entropy(x, torch.ones(V, D), torch.zeros(4, dtype=torch.long)),
    "log-probabilities": lambda x: (
        lowtide.linear_log_probs(x, torch.ones(V, D), torch.zeros(4, dtype=torch.long)).entropy
    ),
}


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("name", MAPPED)
def test_nothing_is_mapped(device, name):
    """vmap over no element gives no element, with the shape and dtype of one."""
    one = MAPPED[name](torch.ones(4, D))
    found = torch.func.vmap(MAPPED[name])(torch.ones(0, 4, D))
    assert (found.shape, found.dtype) == ((0, *one.shape), one.dtype)
