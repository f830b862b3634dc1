"""The pass over both heads' logits, in Triton (interpreted on a CPU) and torch, against float64."""

import importlib.util
import math

import pytest
import torch

from lowtide.ops.distillation import divergences, planner, softmax_torch
from lowtide.ops.distillation.softmax_torch import HeadTile, Statistics
from lowtide.ops.linear_cross_entropy.engines.formulas.row_math import LogitTransform
from tests.ops.distillation.helpers import DIVERGENCES, check, differentiate, fused, make_inputs
from tests.support.loss import interpreted, norm, skip_unless_runnable

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
EPS = torch.finfo(torch.float32).eps
BETAS = [0.0, 1.0, 0.5, 0.1]
CHAINS = [{}, {"bias": True, "temperature": 1.7}, {"bias": True, "temperature": 0.6, "softcap": 3.0}]


@pytest.fixture(params=["triton", "torch"])
def backend(request, device):
    skip_unless_runnable(request.param, device)
    return request.param


def divergence_(backend):
    if backend == "torch":
        return softmax_torch.divergence_
    from lowtide.ops.distillation import softmax_triton

    return softmax_triton.divergence_


class Case:
    """Products of C rows and V classes, in columns of wider buffers, and what goes with them."""

    def __init__(self, device, C=3, V=45, *, bias=False, temperature=1.0, softcap=None, apart=3.0):
        def head(product):
            wide = torch.full((C, V + 3), 1e9, device=device)[:, :V]
            bias_V = torch.randn(V, device=device) if bias else None
            transform = LogitTransform(bias_V, softcap=softcap or 0.0, temperature=temperature)
            return HeadTile(wide.copy_(product), transform)

        student = 3 * torch.randn(C, V)
        self.student, self.teacher = head(student), head(student + apart * torch.randn(C, V))
        if apart == 0:
            self.teacher = self.teacher._replace(transform=self.student.transform)
        self.coef = torch.randn(C, device=device)
        self.C, self.V, self.softcap = C, V, softcap

    def exact(self, beta, dtype=torch.float64):
        """Each row's loss, and the gradient of the student's products by coef and temperature."""

        def log_probs(head):
            product = head.product_CB.detach().to(dtype).requires_grad_()
            bias_V, softcap = head.transform.bias_V, head.transform.softcap
            u = product if bias_V is None else product + bias_V
            u = softcap * torch.tanh(u / softcap) if softcap else u
            return product, (u / head.transform.temperature).log_softmax(1)

        (product, s), (_, t) = log_probs(self.student), log_probs(self.teacher)
        loss = divergences.losses(s, t.detach(), beta)
        (gradient,) = torch.autograd.grad((loss * self.coef).sum(), product)
        return loss.detach(), gradient * self.student.transform.temperature

    def run(self, backend, beta, gradient_dtype=None, *, statistics=None, pass_logits=100):
        known = statistics or Statistics.of(torch.empty(self.C, device=self.coef.device))
        gradient = divergence_(backend)(
            self.student,
            self.teacher,
            known,
            self.coef,
            beta,
            take_sums=statistics is None,
            take_means=statistics is None,
            gradient_dtype=gradient_dtype,
            pass_logits=pass_logits,
        )
        return known, gradient


def rounded(exact, dtype, backend):
    """To the nearest; but Triton's interpreter cuts float32 off after the bits of bfloat16."""
    if backend == "triton" and interpreted() and dtype == torch.bfloat16:
        return (exact.float().view(torch.int32) & -65536).view(torch.float32).double()
    return exact.to(dtype).double()


def check_pass(got, exact, eager, magnitude, dtype=torch.float32, backend="torch"):
    """Twice as far from the truth as eager torch, a rounding of the sums, and one to dtype."""
    allowed = 2 * norm(eager.double() - exact) + 2 * EPS * norm(magnitude)
    if dtype != torch.float32:
        allowed += 1.1 * norm(rounded(exact, dtype, backend) - exact)
    assert got.dtype == dtype
    assert norm(got.double() - exact) <= allowed, f"{norm(got.double() - exact):.3e} exceeds {allowed:.3e}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("chain", CHAINS, ids=["plain", "bias", "cap"])
@pytest.mark.parametrize(("V", "block"), [(1, 8192), (2, 8192), (45, 16), (45, 8192)])
def test_losses_and_gradients(device, backend, monkeypatch, V, block, chain, beta, dtype):
    if backend == "triton":
        from lowtide.ops.distillation import softmax_triton

        monkeypatch.setattr(softmax_triton, "BLOCK", block)
        monkeypatch.setattr(softmax_triton, "BLOCK_WITH_OPTIONS", block)
    case = Case(device, V=V, **chain)
    (loss, gradient), (eager_loss, eager_gradient) = case.exact(beta), case.exact(beta, torch.float32)
    statistics, got = case.run(backend, beta, dtype)
    check_pass(statistics.loss_N, loss, eager_loss, loss.abs() + 1)
    share = case.coef.double().abs() * (loss + 1)
    check_pass(got, gradient, eager_gradient, share, dtype, backend)


@pytest.mark.parametrize("beta", BETAS)
def test_gradient_by_class_blocks(device, backend, beta):
    """From statistics that are known, the same numbers as of all classes at once."""
    whole, parts = (torch.manual_seed(1) and Case(device, bias=True, temperature=1.3) for _ in range(2))
    statistics, expected = whole.run(backend, beta, torch.float32)
    for classes in (slice(0, 13), slice(13, 30), slice(30, 45)):
        part = Case(device, V=classes.stop - classes.start)
        part.coef = parts.coef
        part.student, part.teacher = (
            HeadTile(head.product_CB[:, classes].contiguous(), head.transform.of(classes))
            for head in (parts.student, parts.teacher)
        )
        _, got = part.run(backend, beta, torch.float32, statistics=statistics)
        torch.testing.assert_close(got, expected[:, classes], rtol=8 * EPS, atol=8 * EPS)


@pytest.mark.parametrize("beta", BETAS)
def test_statistics_alone(device, backend, beta):
    first, again = (torch.manual_seed(1) and Case(device) for _ in range(2))
    statistics, _ = first.run(backend, beta, torch.float32)
    alone, gradient = again.run(backend, beta)
    assert gradient is None
    assert all(map(torch.equal, alone.vectors, statistics.vectors))


@pytest.mark.parametrize("beta", BETAS)
def test_teacher_equals_student(device, backend, beta):
    """Exactly nothing."""
    statistics, gradient = Case(device, apart=0, **CHAINS[2]).run(backend, beta, torch.float32)
    assert torch.equal(statistics.loss_N, torch.zeros_like(statistics.loss_N))
    assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("apart", [1e-2, 1e-3])
def test_loss_digits_near_teacher(device, backend, apart, beta):
    case = Case(device, C=32, V=507, apart=apart)
    (loss, _), (eager, _) = case.exact(beta), case.exact(beta, torch.float32)
    statistics, _ = case.run(backend, beta)
    assert (statistics.loss_N >= (0 if 0 < beta < 1 else -1e-7)).all()
    assert norm(statistics.loss_N - loss) <= 0.5 * norm(eager - loss)


@pytest.mark.parametrize("excludes", ["student", "teacher", "both"])
@pytest.mark.parametrize("beta", BETAS)
def test_excluded_classes(device, backend, beta, excludes):
    case = Case(device)
    for name in ("student", "teacher"):
        if excludes in (name, "both"):
            getattr(case, name).product_CB[:, 3] = -torch.inf
    loss, gradient = case.exact(beta)
    if (beta, excludes) == (1, "teacher"):  # there is no gradient
        assert case.run(backend, beta)[0].loss_N.isposinf().all()
        return
    statistics, got = case.run(backend, beta, torch.float32)
    if (beta, excludes) == (0, "student"):
        assert statistics.loss_N.isposinf().all()
        assert got.isfinite().all()
        return
    torch.testing.assert_close(statistics.loss_N.double(), loss, rtol=1e-5, atol=1e-6)
    assert torch.equal(got[:, 3] == 0, torch.full_like(case.coef, excludes != "teacher").bool())
    kept = [v for v in range(45) if v != 3]
    torch.testing.assert_close(got.double()[:, kept], gradient[:, kept], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("offset", [-1e4, 1e4])
@pytest.mark.parametrize("beta", BETAS)
def test_logits_far_from_zero(device, backend, beta, offset):
    case = Case(device)
    case.student.product_CB.add_(offset)
    (loss, gradient), (eager_loss, eager_gradient) = case.exact(beta), case.exact(beta, torch.float32)
    statistics, got = case.run(backend, beta, torch.float32)
    share = case.coef.double().abs() * (loss + abs(offset))
    check_pass(statistics.loss_N, loss, eager_loss, loss.abs() + abs(offset))
    check_pass(got, gradient, eager_gradient, share)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_overwrites_student_logits(device, dtype):
    skip_unless_runnable("triton", device)
    case = Case(device)
    start, teacher = case.student.product_CB.data_ptr(), case.teacher.product_CB.clone()
    _, got = case.run("triton", 0.5, dtype)
    assert got.data_ptr() == start + (0 if dtype == torch.float32 else 48 * 2)
    assert got.stride() == (48 * 4 // dtype.itemsize, 1)
    assert torch.equal(case.teacher.product_CB, teacher)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("room", [1, 8])
def test_whole_call(device, monkeypatch, divergence, dtype, room):
    skip_unless_runnable("triton", device)
    monkeypatch.setattr(planner, "choose_backend", lambda *_: "triton")
    inputs = make_inputs(9, 5, 21, 4, device=device, dtype=dtype, bias=True)
    bytes = 20_000 if device == "cpu" else 45_000  # the allocator of CUDA hands out more
    options = {"temperature": 1.3, "student_softcap": 3.0, "workspace": room * bytes}
    check(differentiate(fused, inputs, divergence, 0.3, **options), inputs, divergence, 0.3, **options)


@pytest.mark.parametrize("upstream", ["of a sum", "of every other row"])
def test_upstream_not_contiguous(device, monkeypatch, upstream):
    """loss.sum() gives one number, expanded; what a kernel reads behind it is anything."""
    skip_unless_runnable("triton", device)
    monkeypatch.setattr(planner, "choose_backend", lambda *_: "triton")
    inputs = make_inputs(9, 5, 21, 4, device=device, bias=True, ignored=0)
    memory = torch.full((18,), torch.nan, device=device)
    memory[::2] = torch.linspace(0.5, 1.5, 9, device=device)
    given = memory[:1].expand(9) if upstream == "of a sum" else memory[::2]
    found = differentiate(fused, inputs, "forward", given, reduction="none")
    check(found, inputs, "forward", given, reduction="none")


@pytest.mark.parametrize("size", [0.0, 1e-7, 1e-3, 0.2, 0.2499, 0.26, 1.0, 20.0, math.inf])
def test_small_functions_keep_digits(device, size):
    """t - m and s - m of two classes whose log-probabilities are so far apart."""
    skip_unless_runnable("triton", device)
    import triton
    import triton.language as tl

    from lowtide.ops.distillation.softmax_triton import expm1, log1p

    @triton.jit
    def kernel(x_ptr, out_ptr, expm1: tl.constexpr, log1p: tl.constexpr):
        x = tl.load(x_ptr + tl.arange(0, 1))
        below = expm1(-x)
        tl.store(out_ptr + tl.arange(0, 1), below)
        tl.store(out_ptr + 1 + tl.arange(0, 1), log1p(below * 0.5))

    x, out = torch.tensor([size], device=device), torch.empty(2, device=device)
    kernel[(1,)](x, out, expm1, log1p)
    below = torch.tensor([-size], dtype=torch.float32).double().expm1()
    exact = torch.cat((below, (below * 0.5).log1p()))
    torch.testing.assert_close(out.double().cpu(), exact, rtol=4 * EPS, atol=0)
