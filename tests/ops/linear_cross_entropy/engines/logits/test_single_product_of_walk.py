"""The engine of float32 logits where it walks over tokens, and forms dW by a single GEMM over all.

It does so in float16, and for calls that one_product.py does not compute, in bfloat16. On the CPU
these run under Triton's interpreter, with products as on a card: float32 sums.

Shapes: N tokens, D features, V classes.
"""

import pytest
import torch

import lowtide
from lowtide.core import matmul
from lowtide.memory import peak_memory
from lowtide.ops.linear_cross_entropy import dispatch
from lowtide.ops.linear_cross_entropy.engines import engine
from lowtide.ops.linear_cross_entropy.engines.logits import spec
from lowtide.ops.linear_cross_entropy.engines.weight_gradient import in_torch
from lowtide.ops.linear_cross_entropy.operator import planner
from lowtide.ops.linear_cross_entropy.planning import operands, requirements
from tests.ops.linear_cross_entropy.engines.logits.test_one_product_of_logits import (
    OPTIONS,
    losses,
    relative,
)
from tests.support.loss import interpreted, make_inputs, planned, workspace_for
from tests.support.operators import check_operator_and_fake, product_of_a_card
from tests.support.rehearsals import in_rehearsal

pytest.importorskip("triton")

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

FP16, BF16 = torch.float16, torch.bfloat16


@pytest.fixture(autouse=True)
def as_on_a_card(device, monkeypatch):
    """Let the CPU multiply float16 operands into float32 sums."""
    monkeypatch.setattr(spec, "FEWEST_ROWS_OF_WALK", 8)
    monkeypatch.setattr(planner, "_slower_than_logits", lambda call, chosen: "in this test")
    monkeypatch.setattr(requirements, "_has_tensor_maps", lambda device: True)
    if device == "cuda":
        return
    if not interpreted():
        pytest.skip("needs Triton's interpreter")
    monkeypatch.setattr(operands, "_dtype", lambda head, options: options.compute_dtype)

    for module in (matmul, engine, in_torch):
        monkeypatch.setattr(module, "product", product_of_a_card)


# G, dW, and X where the factor is no power of two are rounded, each by 2^-12 (2^-9) at most. The
# interpreter cuts a float32 off where a card rounds.
MOST_ERROR = {"cuda": 3 * 2**-12, "cpu": 1.2e-3}
MOST_ERROR_OF = {FP16: MOST_ERROR, BF16: {"cuda": 3 * 2**-9, "cpu": 9.6e-3}}
ROOM = 1 << 24


def in_several_chunks(inputs, **options):
    """The smallest workspace in which dW is a single GEMM: its memory holds the logits before."""
    return workspace_for(inputs, lambda plan: plan.weight_gradient == "single_product", **options)


@pytest.mark.parametrize(
    ("dtype", "reduction"), [(FP16, "mean"), (FP16, "sum"), (FP16, "none"), (BF16, "none")], ids=str
)
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize(("N", "V"), [(37, 144), (40, 203)])
def test_gradients(device, N, V, chunks, dtype, reduction):
    """From one chunk with logits of its own, and from several; an ignored row is 0."""
    D, options = 32, {"backend": "triton", "reduction": reduction}
    inputs = make_inputs(N, D, V, dtype=dtype, device=device)
    workspace = ROOM if chunks == 1 else in_several_chunks(inputs, **options)
    made = planned(inputs, workspace, **options)
    assert (made.engine, made.weight_gradient) == ("logits_triton", "single_product")
    assert not made.one_product_of_logits
    assert -(-N // made.rows) == chunks
    target = inputs.target.clone().flatten()
    target[2] = -100
    x, w = inputs.input.detach().reshape(N, D).clone().requires_grad_(), inputs.linear_weight
    loss = lowtide.linear_cross_entropy(x, w, target, workspace=workspace, **options)
    upstream = torch.linspace(0.5, 1.5, max(1, loss.numel()), device=device).view(loss.shape)
    found = torch.autograd.grad(loss, (x, w), upstream)
    xd, wd = (each.detach().double().requires_grad_() for each in (x, w))
    true = torch.nn.functional.cross_entropy(xd @ wd.t(), target, reduction=reduction)
    exact = torch.autograd.grad(true, (xd, wd), upstream.double())
    assert relative(loss.detach(), true.detach()) < 1e-6
    for got, wanted in zip(found, exact):
        assert relative(got, wanted) < MOST_ERROR_OF[dtype][device]
    assert not found[0][2].any()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_large_numbers_of_an_ignored_row(device, reduction):
    """They take no digit from the other rows."""
    N, D, V = 40, 32, 144
    x, w = (torch.randn(rows, D, device=device).half().requires_grad_() for rows in (N, V))
    target = torch.arange(N, device=device)
    target[2] = -100
    found = []
    for number in (6e4, 0.0):
        with torch.no_grad():
            x[2] = number
        loss = lowtide.linear_cross_entropy(
            x.view(5, 8, D), w, target.view(5, 8), workspace=ROOM, backend="triton", reduction=reduction
        )
        found.append(torch.autograd.grad(loss.sum(), w)[0])
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("names", [*([each] for each in OPTIONS), OPTIONS], ids="-".join)
def test_options(device, names, dtype):
    """A scale with a gradient, and with it all options, take the walk in bfloat16, too."""
    N, D, V = 24, 32, 101
    inputs = make_inputs(N, D, V, dtype=dtype, device=device)
    x, w, target = inputs.input.detach().reshape(N, D), inputs.linear_weight, inputs.target.flatten().clone()
    target[3] = -100
    bias = torch.randn(V, device=device).requires_grad_()
    scale = torch.tensor(1.5, device=device).requires_grad_()
    values = {
        "linear_bias": bias,
        "weight": torch.rand(V, device=device) + 0.5,
        "label_smoothing": 0.2,
        "softcap": 3.0,
        "logit_scale": scale,
        "z_loss": 0.1,
        "row_weight": torch.rand(N, device=device),
        "normalizer": 7.0,
    }
    options = {name: values[name] for name in names}
    x.requires_grad_()
    leaves = [x, w, *(each for each in options.values() if getattr(each, "requires_grad", False))]
    loss = lowtide.linear_cross_entropy(x, w, target, workspace=ROOM, backend="triton", **options)
    found = torch.autograd.grad(loss, leaves)
    wide = [each.detach().double().requires_grad_() for each in leaves]
    named = dict(zip((id(each) for each in leaves), wide))
    exact = {name: named.get(id(value), value) for name, value in options.items()}
    true = losses(wide[0], wide[1], target, **exact)
    assert relative(loss.detach(), true.detach()) < 1e-5
    for got, wanted in zip(found, torch.autograd.grad(true, wide)):
        assert relative(got, wanted) < MOST_ERROR_OF[dtype][device]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("of_x", "upstream"), [(2**-6, 2**7), (1, 2**9), (2**6, 2**-4), (2**9, 2**-12)])
def test_small_and_large_numbers(device, reduction, of_x, upstream):
    """No operand leaves float16's range where the gradient is in it, whatever the loss scale."""
    N, D, V = 24, 32, 101
    inputs = make_inputs(N, D, V, dtype=FP16, device=device, ignored=0.0)
    x = (inputs.input.detach().reshape(N, D) * of_x).requires_grad_()
    w = (inputs.linear_weight.detach() / of_x).requires_grad_()
    target, options = inputs.target.flatten(), {"reduction": reduction}
    loss = lowtide.linear_cross_entropy(x, w, target, workspace=ROOM, backend="triton", **options)
    found = torch.autograd.grad(loss, (x, w), torch.full_like(loss, upstream))
    xd, wd = (each.detach().double().requires_grad_() for each in (x, w))
    true = torch.nn.functional.cross_entropy(xd @ wd.t(), target, **options)
    for got, wanted in zip(found, torch.autograd.grad(true, (xd, wd), torch.full_like(true, upstream))):
        rounded = relative(wanted.half(), wanted)  # with a large weight, dX ends at float16's subnormals
        assert relative(got, wanted) < MOST_ERROR[device] + 2 * rounded


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("N", [1, 2, 33, 128])
def test_rows_that_all_add_to_one_class(device, N, reduction):
    """The largest sum that there is stays in float16's range, with what is small beside it."""
    D, V = 32, 144
    x = (torch.ones(N, D) * 2.0 ** torch.linspace(6, -6, D)).to(device, FP16).requires_grad_()
    w = (torch.randn(V, D) * 1e-2).to(device, FP16)
    w[3] = -1  # so that the target's probability is near 0
    w.requires_grad_()
    target = torch.full((N,), 3, device=device)
    options = {"reduction": reduction}
    loss = lowtide.linear_cross_entropy(x, w, target, workspace=ROOM, backend="triton", **options)
    found = torch.autograd.grad(loss.sum(), (x, w))
    xd, wd = (each.detach().double().requires_grad_() for each in (x, w))
    true = torch.nn.functional.cross_entropy(xd @ wd.t(), target, **options)
    for got, wanted in zip(found, torch.autograd.grad(true.sum(), (xd, wd))):
        assert relative(got, wanted) < MOST_ERROR[device]
        assert relative(got[-1], wanted[-1]) < 4 * MOST_ERROR[device]  # a class of a small probability


def test_normalizer_rounds_nothing(device):
    """The device alone knows it. Divided by 2^20 and multiplied again, dW has a sum's bits.

    The number of rows gives those of a mean.
    """
    x, w = torch.randn(21, 32).to(device, FP16), torch.randn(144, 32).to(device, FP16).requires_grad_()
    target = torch.randint(144, (21,), device=device)

    def found(scale, **options):
        loss = lowtide.linear_cross_entropy(x, w, target, workspace=ROOM, backend="triton", **options)
        return torch.autograd.grad(loss * scale, (w,))[0]

    assert torch.equal(found(2.0**20, normalizer=2.0**20), found(1.0, reduction="sum"))
    assert torch.equal(found(3.0, normalizer=21), found(3.0))


@pytest.mark.parametrize("N", [16, 250])
@pytest.mark.parametrize("largest", [1, 300])
def test_small_numbers_of_each_operand(device, N, largest):
    """A class of the probability 1e-7, or features 300 times smaller than the largest one."""
    D, V = 32, 144
    x, w = torch.randn(N, D), torch.randn(V, D) * 0.1
    x[:, 0], w[:, 0] = largest, 0
    w[-1, 0] = -11 * (largest == 1)
    x, w = (each.to(device, FP16).requires_grad_() for each in (x, w))
    target = torch.randint(V - 1, (N,), device=device)
    loss = lowtide.linear_cross_entropy(x, w, target, workspace=ROOM, backend="triton")
    scale = 2.0**16 / largest
    (found,) = torch.autograd.grad(loss * scale, (w,))
    xd, wd = (each.detach().double().requires_grad_() for each in (x, w))
    (wanted,) = torch.autograd.grad(torch.nn.functional.cross_entropy(xd @ wd.t(), target) * scale, (wd,))
    for part in ((slice(-1), slice(1, None)), (slice(-1, None), slice(None))):
        assert relative(found[part], wanted[part]) < 0.01


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("entropy", [False, True])
def test_log_probs(device, entropy, dtype):
    N, D, V = 24, 32, 144
    inputs = make_inputs(N, D, V, dtype=dtype, device=device, ignored=0.0)
    x, w, target = inputs.input.detach().reshape(N, D), inputs.linear_weight, inputs.target.flatten()
    x.requires_grad_()
    result = lowtide.linear_log_probs(x, w, target, workspace=ROOM, backend="triton")
    found = torch.autograd.grad((result.entropy if entropy else result.log_prob).sum(), (x, w))
    xd, wd = (each.detach().double().requires_grad_() for each in (x, w))
    z_NV = (xd @ wd.t()).log_softmax(1)
    true = -(z_NV.exp() * z_NV).sum() if entropy else z_NV.gather(1, target[:, None]).sum()
    for got, wanted in zip(found, torch.autograd.grad(true, (xd, wd))):
        assert relative(got, wanted) < MOST_ERROR_OF[dtype][device]


@pytest.mark.parametrize("N", [3, 7, 16, 23])
def test_mean_rounds_nothing(device, monkeypatch, N):
    """Without ignored rows X is multiplied by a power of two, whatever the number of rows.

    Only what is small beside its largest number ends at float16's subnormals.
    """
    kept = []
    finish = in_torch.SingleProduct.finish

    def remembered(self):
        if not in_rehearsal():
            kept.append(self.x_ND.clone())
        finish(self)

    monkeypatch.setattr(in_torch.SingleProduct, "finish", remembered)
    inputs = make_inputs(N, 32, 144, dtype=FP16, device=device, ignored=0.0)
    x = inputs.input.detach().reshape(N, 32).requires_grad_()
    lowtide.linear_cross_entropy(
        x, inputs.linear_weight, inputs.target.flatten(), workspace=ROOM, backend="triton"
    )
    (x_ND,) = kept
    factor = (x_ND.abs().amax() / x.detach().abs().amax()).double()
    assert torch.equal(torch.frexp(factor)[0].cpu(), torch.tensor(0.5, dtype=torch.double))
    assert ((x_ND.double() - x.detach().double() * factor).abs() <= 2**-25).all()


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("chunks", [1, 3])
def test_workspace_kept(device, reduction, chunks):
    """In forward and backward, beyond the gradients."""
    N, D, V = 96, 64, 4096
    options = {"backend": "triton", "reduction": reduction}
    inputs = make_inputs(N, D, V, dtype=FP16, device=device, ignored=0.0)
    workspace = 1 << 23 if chunks == 1 else in_several_chunks(inputs, **options)
    made = planned(inputs, workspace, **options)
    assert (made.weight_gradient, -(-N // made.rows)) == ("single_product", chunks)
    x, w, target = inputs.input.detach().reshape(N, D), inputs.linear_weight, inputs.target.flatten()
    x.requires_grad_()

    def step():
        loss = lowtide.linear_cross_entropy(x, w, target, workspace=workspace, **options)
        return torch.autograd.grad(loss.sum(), (x, w))

    step()
    with peak_memory(device) as peak:
        step()
    # In this test, products on the CPU copy their operands.
    copies = 0 if device == "cuda" else 4 * (N + V) * D + 4 * N * V + 8 * V * D
    assert peak.bytes <= workspace + 2 * (N + V) * D + 4 * N + copies


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_operator_and_its_fake_agree(device, reduction):
    inputs = make_inputs(24, 32, 144, dtype=FP16, device=device)
    check_operator_and_fake(inputs, planned(inputs, ROOM, backend="triton", reduction=reduction).options)


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_class_probabilities(device, dtype, reduction):
    N, D, V = 24, 32, 101
    inputs = make_inputs(N, D, V, dtype=dtype, device=device, probabilities=True, ignored=0.0)
    x, w = inputs.input.detach().reshape(N, D).requires_grad_(), inputs.linear_weight
    soft, options = inputs.target.reshape(N, V), {"reduction": reduction}
    assert planned(inputs, ROOM, backend="triton", **options).weight_gradient == "single_product"
    loss = lowtide.linear_cross_entropy(x, w, soft, workspace=ROOM, backend="triton", **options)
    found = torch.autograd.grad(loss.sum(), (x, w))
    xd, wd = (each.detach().double().requires_grad_() for each in (x, w))
    true = torch.nn.functional.cross_entropy(xd @ wd.t(), soft.double(), **options)
    for got, wanted in zip(found, torch.autograd.grad(true.sum(), (xd, wd))):
        assert relative(got, wanted) < MOST_ERROR_OF[dtype][device]


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_two_terms(device, dtype, reduction):
    """The single GEMM forms the first dW; the second is summed."""
    N, V, options = 24, 101, {"reduction": reduction}
    leaves = [torch.randn(rows, D) for rows, D in ((N, 32), (N, 16), (V, 32), (V, 16))]
    leaves = [each.to(device, dtype).requires_grad_() for each in leaves]
    target = torch.randint(V, (N,), device=device)
    given = {"workspace": ROOM, "backend": "triton", **options}
    loss = dispatch.cross_entropy(leaves[:2], leaves[2:], target, **given)
    found = torch.autograd.grad(loss.sum(), leaves)
    wide = [each.detach().double().requires_grad_() for each in leaves]
    z = sum(x @ w.t() for x, w in zip(wide[:2], wide[2:]))
    true = torch.nn.functional.cross_entropy(z, target, **options)
    for got, wanted in zip(found, torch.autograd.grad(true.sum(), wide)):
        assert relative(got, wanted) < MOST_ERROR_OF[dtype][device]
