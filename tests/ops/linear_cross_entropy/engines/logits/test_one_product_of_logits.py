"""The engine of float32 logits where it forms dW by a single GEMM over all tokens.

On the CPU these run under Triton's interpreter, with products of bfloat16 as on a card: float32
sums.

Shapes: N tokens, D features, V classes.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import lowtide
from lowtide.core import matmul
from lowtide.memory import peak_memory
from lowtide.ops.linear_cross_entropy.definition.head import Head, Labels
from lowtide.ops.linear_cross_entropy.engines.logits import one_product, spec
from lowtide.ops.linear_cross_entropy.operator import planner
from lowtide.ops.linear_cross_entropy.operator.arguments import call_of
from lowtide.ops.linear_cross_entropy.planning import operands, requirements
from tests.support.loss import interpreted, make_inputs, planned
from tests.support.operators import check_operator_and_fake
from tests.support.rehearsals import in_rehearsal

pytest.importorskip("triton")

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def few_tokens(device, monkeypatch):
    """Every call that can takes the single GEMM, on the CPU in the operands' own dtype."""
    monkeypatch.setattr(planner, "_slower_than_logits", lambda call, chosen: "in this test")
    monkeypatch.setattr(spec, "FEWEST_ROWS", 8)
    if device == "cuda":
        return
    if not interpreted():
        pytest.skip("needs Triton's interpreter")
    monkeypatch.setattr(requirements, "_has_tensor_maps", lambda device: True)
    monkeypatch.setattr(operands, "_dtype", lambda head, options: options.compute_dtype)

    def product(out, a, b, *, add=False, scale=1.0):
        found = scale * (a.float() @ b.float())
        out.copy_(out + found if add else found)

    monkeypatch.setattr(one_product, "product", product)
    monkeypatch.setattr(matmul, "product", product)


# G, dW, and X where rows are ignored are rounded to bfloat16, each by 2^-9 at most. The interpreter
# cuts a float32 off where a card rounds.
MOST_ERROR = {"cuda": 3 * 2**-9, "cpu": 9e-3}
ROOM = 1 << 24  # for a single GEMM; by default a call so small may hold no more than the dense one


def relative(actual, exact):
    return float((actual.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("N", "V"), [(1, 40), (24, 144), (40, 203)])
def test_gradients(device, N, V, reduction):
    """Of one product of logits, and of several; ignored rows may be NaN."""
    D = 32
    inputs = make_inputs(N, D, V, dtype=torch.bfloat16, device=device)
    made = planned(inputs, ROOM, backend="triton", reduction=reduction)
    assert (made.engine, made.weight_gradient) == ("logits_triton", "single_product")
    target = inputs.target.clone().flatten()
    x = inputs.input.detach().reshape(N, D).clone()
    if N > 2:
        target[2] = -100
        x[2] = torch.nan
    x.requires_grad_()
    w = inputs.linear_weight
    loss = lowtide.linear_cross_entropy(x, w, target, reduction=reduction, workspace=ROOM, backend="triton")
    dx, dw = torch.autograd.grad(loss, (x, w), torch.full_like(loss, 0.5))
    kept = target != -100
    xd, wd = x.detach()[kept].double().requires_grad_(), w.detach().double().requires_grad_()
    true = F.cross_entropy(xd @ wd.t(), target[kept], reduction=reduction)
    true_dx, true_dw = torch.autograd.grad(true, (xd, wd), torch.full_like(true, 0.5))
    assert relative(loss.detach(), true.detach()) < 1e-6
    assert relative(dx[kept], true_dx) < MOST_ERROR[device]
    assert relative(dw, true_dw) < MOST_ERROR[device]
    assert not dx[~kept].any()


@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("V", [144, 200])
def test_bias_and_weight_by_columns(device, V, by_columns):
    """db is the sum of G. A weight by columns has its gradient by columns, and is not copied."""
    inputs = make_inputs(24, 32, V, dtype=torch.bfloat16, device=device, bias=True)
    w = inputs.linear_weight.detach()
    w = (w.t().contiguous().t() if by_columns else w).requires_grad_()
    inputs = replace(inputs, linear_weight=w)
    made = planned(inputs, ROOM, backend="triton")
    assert (made.engine, made.weight_gradient) == ("logits_triton", "single_product")
    target, b = inputs.target.flatten(), inputs.linear_bias
    x = inputs.input.detach().reshape(24, 32).requires_grad_()
    options = {"linear_bias": b, "workspace": ROOM, "backend": "triton"}
    found = torch.autograd.grad(lowtide.linear_cross_entropy(x, w, target, **options), (x, w, b))
    assert found[1].stride() == w.stride()
    exact = [each.detach().double().requires_grad_() for each in (x, w, b)]
    true = losses(*exact[:2], target, linear_bias=exact[2])
    for actual, expected in zip(found, torch.autograd.grad(true, exact)):
        assert relative(actual, expected) < MOST_ERROR[device]


def losses(
    x,
    w,
    target,
    *,
    linear_bias=None,
    weight=None,
    label_smoothing=0.0,
    softcap=None,
    logit_scale=None,
    z_loss=0.0,
    row_weight=None,
    normalizer=None,
):
    """The mean of the rows that are not ignored, by its definition, in the dtype of x and w."""
    z = x @ w.t() + (0 if linear_bias is None else linear_bias.double())
    z = z if logit_scale is None else z * logit_scale
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    weight = None if weight is None else weight.double()
    loss_N = F.cross_entropy(z, target, weight, reduction="none", label_smoothing=label_smoothing)
    loss_N = loss_N + z_loss * z.logsumexp(1).square() * (target != -100)
    loss_N = loss_N if row_weight is None else loss_N * row_weight.double()
    count = (target != -100).sum() if weight is None else weight[target.clamp(min=0)][target != -100].sum()
    return loss_N.sum() / (count if normalizer is None else normalizer)


OPTIONS = ["linear_bias", "weight", "label_smoothing", "softcap", "logit_scale", "z_loss", "row_weight",
           "normalizer"]  # fmt: skip


@pytest.mark.parametrize("names", [*([each] for each in OPTIONS), OPTIONS], ids="-".join)
def test_options(device, names):
    N, D, V = 24, 32, 101
    inputs = make_inputs(N, D, V, dtype=torch.bfloat16, device=device)
    x, w, target = inputs.input.detach().reshape(N, D), inputs.linear_weight, inputs.target.flatten().clone()
    target[3] = -100
    values = {
        "linear_bias": torch.randn(V, device=device),
        "weight": torch.rand(V, device=device) + 0.5,
        "label_smoothing": 0.2,
        "softcap": 3.0,
        "logit_scale": 1.5,
        "z_loss": 0.1,
        "row_weight": torch.rand(N, device=device),
        "normalizer": 7.0,
    }
    options = {name: values[name] for name in names}
    x.requires_grad_()
    loss = lowtide.linear_cross_entropy(x, w, target, workspace=ROOM, backend="triton", **options)
    found = torch.autograd.grad(loss, (x, w))
    xd, wd = (each.detach().double().requires_grad_() for each in (x, w))
    true = losses(xd, wd, target, **options)
    assert relative(loss.detach(), true.detach()) < 1e-5
    for actual, expected in zip(found, torch.autograd.grad(true, (xd, wd))):
        assert relative(actual, expected) < MOST_ERROR[device]


def test_mean_rounds_once(device, monkeypatch):
    """Without ignored rows X enters dW's product as it is, whatever the number of rows."""
    multiplied = []
    product = one_product.product

    def kept(out, a, b, *, scale=1.0):
        if not in_rehearsal():
            multiplied.append((b.clone(), scale))
        product(out, a, b, scale=scale)

    monkeypatch.setattr(one_product, "product", kept)
    for N in (3, 7, 16, 23):
        inputs = make_inputs(N, 32, 144, dtype=torch.bfloat16, device=device, ignored=0.0)
        x = inputs.input.detach().reshape(N, 32).requires_grad_()
        lowtide.linear_cross_entropy(
            x, inputs.linear_weight, inputs.target.flatten(), workspace=ROOM, backend="triton"
        )
        scaled_ND, scale = multiplied[-1]
        assert torch.equal(scaled_ND, x)
        assert scale == 1 / N


def test_confident_tokens(device):
    """1 - p of a target is exact where p rounds to 1: the target's term is left out of the sum."""
    N, D, V = 16, 32, 40
    w = torch.eye(V, D, dtype=torch.bfloat16, device=device).requires_grad_()
    target = torch.arange(N, device=device)
    x = (20 * torch.eye(N, D, dtype=torch.bfloat16, device=device)).requires_grad_()
    loss = lowtide.linear_cross_entropy(x, w, target, workspace=ROOM, backend="triton")
    found = torch.autograd.grad(loss, (x, w))
    xd, wd = (each.detach().double().requires_grad_() for each in (x, w))
    z = xd @ wd.t()
    others = (z - z.gather(1, target[:, None])).masked_fill(F.one_hot(target, V).bool(), -torch.inf)
    true = others.logsumexp(1).exp().log1p().mean()
    assert relative(loss.detach(), true.detach()) < 1e-5
    for actual, expected in zip(found, torch.autograd.grad(true, (xd, wd))):
        assert relative(actual, expected) < MOST_ERROR[device]


def test_memory_matches_plan(device):
    """What is held beyond the gradients is what the plan says, no more than eager torch holds."""
    N, D, V = 96, 64, 4096
    inputs = make_inputs(N, D, V, dtype=torch.bfloat16, device=device, ignored=0.0)
    made = planned(inputs, None, backend="triton")
    assert made.weight_gradient == "single_product"
    call = (
        inputs.input.detach().reshape(N, D).requires_grad_(),
        inputs.linear_weight,
        inputs.target.flatten(),
    )
    dense = max(6 * N * V - 2 * (N + V) * D, 2 * N * V)

    def step():
        return lowtide.linear_cross_entropy(*call, backend="triton")

    step()
    with peak_memory(device) as peak:
        step()
    held = peak.bytes - 2 * (N + V) * D
    head = Head((call[0],), (call[1],))
    grads = True, True, False, False
    foretold = planner.peak_bytes(call_of(head, Labels(call[2]), grads, made.options, log_probs=False))
    assert held >= 2 * N * V
    if device == "cuda":  # in this test, products on the CPU copy their operands
        assert held <= foretold
    assert foretold <= dense + 256 * (N + D + V) + (64 << 20)


def test_operator_and_its_fake_agree(device):
    inputs = make_inputs(24, 32, 144, dtype=torch.bfloat16, device=device)
    check_operator_and_fake(inputs, planned(inputs, ROOM, backend="triton").options)
