"""The path without a pass over the logits: on a card as it is, on the CPU through the interpreter.

The interpreter has no product of bfloat16 operands: there the path runs on float32 ones, in small
tiles.
"""

from dataclasses import replace

import pytest
import torch

from tests.support.loss import (
    HALVES,
    Inputs,
    check_log_probs,
    dense,
    differentiate,
    differentiate_log_probs,
    fused,
    fused_log_probs,
    make_inputs,
    planned,
    smallest_workspace,
    workspace_for,
)

pytest.importorskip("triton")

from lowtide.ops.linear_cross_entropy.engines.weight_gradient.accumulators import PackedSum
from lowtide.ops.linear_cross_entropy.planning import requirements, weight_gradient
from tests.ops.linear_cross_entropy.on_exponentials import (  # noqa: F401
    dtype_on,
    everywhere,
    run,
    several_blocks,
    with_options,
)
from tests.support.extended import all_extended_but

# The interpreter computes with numpy, which warns when exp(z - z_target) overflows at the first
# attempt.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("class_weight", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_every_reduction(device, reduction, class_weight):
    inputs = make_inputs(D=24, V=101, device=device, dtype=dtype_on(device), class_weight=class_weight)
    upstream = torch.randn(inputs.leading, device=device) if reduction == "none" else -0.5
    run(inputs, reduction=reduction, upstream=upstream)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_several_chunks(device, reduction):
    inputs = make_inputs(70, 24, 101, device=device, dtype=dtype_on(device))
    workspace = workspace_for(inputs, lambda plan: plan.rows >= 18, backend="triton")
    run(inputs, reduction=reduction, workspace=workspace)


def test_class_blocks(device):
    """A bfloat16 weight with no float32 sum. The interpreter truncates: twice the rounding."""
    N, V = several_blocks(device)
    inputs = make_inputs(N, 24, V, device=device, dtype=torch.bfloat16)
    workspace = 120_000 if device == "cuda" else 40_000
    by_class = planned(inputs, workspace, backend="triton")
    assert by_class.weight_gradient == "class_blocks"
    assert by_class.block_classes < V
    run(inputs, workspace=workspace, factor=2.0 if device == "cuda" else 4.0)


@pytest.mark.parametrize(
    "options", all_extended_but([{}], [{}, {"label_smoothing": 0.2, "reduction": "none"}]), ids=str
)
@pytest.mark.parametrize("bits", all_extended_but([24], [24, 20]))
def test_packed_sum(device, bits, options, monkeypatch):
    """Four bytes a weight do not fit, one does or half of one, in several chunks. The interpreter
    truncates, as above."""
    monkeypatch.setattr(weight_gradient, "ENOUGH_ROWS", 1 if bits == 24 else 1 << 20)
    N = 1100 if device == "cuda" else 150
    inputs = make_inputs(N, 24, 203, device=device, dtype=torch.bfloat16, class_weight=bool(options))
    bytes = workspace_for(inputs, lambda plan: plan.weight_gradient == "packed", backend="triton", **options)
    made = planned(inputs, bytes, backend="triton", **options)
    assert (made.rows <= N // 2, made.sum_bits) == (True, bits)
    upstream = torch.randn(N, device=device) if options else -0.5
    factor = 2.0 if device == "cuda" else 4.0
    run(inputs, upstream=upstream, workspace=bytes, factor=factor, **options)


@pytest.mark.parametrize("bits", [24, 20])
def test_packed_sum_accuracy(device, bits):
    """Each product that is added rounds the sum by half a unit of its last bit; what is not finite
    stays so."""
    chunks, C, V, D = 6, 40, 72, 48
    dtype = dtype_on(device)
    e_CV = torch.rand(chunks, C, V, device=device).to(dtype)
    x_CD = torch.randn(chunks, C, D, device=device).to(dtype)
    x_CD[2, :, 0], x_CD[3, :, 1] = torch.nan, torch.inf
    rounded_VD = torch.empty(V, D, device=device, dtype=torch.bfloat16)
    total = PackedSum(rounded_VD, torch.ones((), device=device), bits=bits)
    exact_VD = torch.zeros(V, D, device=device, dtype=torch.float64)
    rounding_VD = torch.zeros_like(exact_VD)
    for chunk in range(chunks):
        total.add_product(e_CV[chunk], x_CD[chunk], first=chunk == 0, last=False)
        exact_VD += e_CV[chunk].double().t() @ x_CD[chunk].double()
        magnitude_VD = e_CV[chunk].double().t() @ x_CD[chunk].double().abs()
        rounding_VD += (
            2.0 ** (8 - bits) * exact_VD.abs() + 2.0**-22 * magnitude_VD
        )  # the products are float32's
    pair_VP, low_VP = total.pair_VP, total.low_VP.int()
    width = bits - 16
    even_VP = (pair_VP << 16) | ((low_VP & (2**width - 1)) << (16 - width))
    odd_VP = (pair_VP & -65536) | (low_VP >> width << (16 - width))
    found_VD = torch.stack([even_VP, odd_VP], 2).view(torch.float32).view(V, D).double()
    assert found_VD[:, 0].isnan().all()
    assert found_VD[:, 1].isposinf().all()
    assert ((found_VD - exact_VD).abs() <= rounding_VD)[:, 2:].all()


@pytest.mark.extended
@pytest.mark.parametrize(("bits", "factor"), [(24, 2.0), (20, 4.0)])
def test_frequent_class_confident(device, bits, factor, monkeypatch):
    """What the probabilities of a class add to its row of dW, and what its targets subtract, are
    fifty times what is left. A sum of first the one and then the other, over 16 chunks, would err
    by several times as much as eager in 24 bits, and 16 times that in 20."""
    monkeypatch.setattr(weight_gradient, "ENOUGH_ROWS", 1 if bits == 24 else 1 << 20)
    N, D, V = 16384 if device == "cuda" else 1024, 16, 40
    generator = torch.Generator().manual_seed(3)
    # Were tokens more alike, all of a target would have one exponential in bfloat16, and one
    # rounding.
    hidden = 1 + torch.randn(N, D, generator=generator) / 16
    weight = torch.randn(V, D, generator=generator) / 8
    weight[7] += 3 / D
    leaves = [each.to(device, torch.bfloat16).requires_grad_() for each in (hidden, weight)]
    p_NV = (leaves[0].double() @ leaves[1].double().t()).softmax(1).detach()
    # Class 7 is a target as often as is likely, at regular places instead of by chance.
    due_N = p_NV[:, 7].cpu().cumsum(0).floor()
    target = torch.randint(8, V, (N,), generator=generator)
    target[due_N.diff(prepend=due_N.new_zeros(1)) > 0] = 7
    inputs = Inputs(*leaves, target.to(device))
    bytes = workspace_for(inputs, lambda plan: plan.weight_gradient != "class_blocks", backend="triton")
    plan = planned(inputs, bytes, backend="triton")
    assert (plan.weight_gradient, plan.sum_bits) == ("packed", bits)
    assert plan.rows <= N // 16

    def row_of(found):
        return found["linear_weight"][7].double()

    exact = row_of(differentiate(dense, inputs.to(torch.float64)))
    eager = row_of(differentiate(dense, inputs))
    found = row_of(differentiate(fused, inputs, workspace=bytes, backend="triton"))
    part = p_NV[:, 7] @ leaves[0].double() / N
    assert part.norm() > 50 * exact.norm()
    assert (found - exact).norm() <= factor * (eager - exact).norm()


def test_entropy_of_unlikely_targets(device):
    """One class, 15 to 38 above the target, has nearly all probability: the rest is exact."""
    N, D = 24, 16
    hidden = torch.zeros(N, D)
    hidden[:, 0], hidden[:, 1] = torch.linspace(15, 38, N), torch.linspace(7, 17, N)
    weight = torch.zeros(40, D)
    weight[33, 0] = weight[7, 0] = 1
    weight[7, 1] = -1
    leaves = [each.to(device, dtype_on(device)).requires_grad_() for each in (hidden, weight)]
    target = torch.zeros(N, dtype=torch.long, device=device)
    inputs = Inputs(*leaves, target)
    found = fused_log_probs(inputs, backend="triton").entropy
    (grad,) = torch.autograd.grad(found.sum(), leaves[:1])
    exact = inputs.to(torch.float64)
    log_p_NV = (exact.input @ exact.linear_weight.t()).log_softmax(1)
    entropy_N = -(log_p_NV.exp() * log_p_NV).sum(1)
    (exact_grad,) = torch.autograd.grad(entropy_N.sum(), [exact.input])
    wide = inputs.to(torch.float32)
    eager_NV = (wide.input @ wide.linear_weight.t()).log_softmax(1)
    eager_N = -(eager_NV.exp() * eager_NV).sum(1)
    # Row by row, as eager float32 errs at worst.
    worst = ((eager_N.double() - entropy_N) / entropy_N).abs().max()
    assert (((found.double() - entropy_N) / entropy_N).abs() <= 2 * worst).all()
    rounding = torch.finfo(leaves[0].dtype).eps
    error_N = (grad.double() - exact_grad).norm(dim=1) / exact_grad.norm(dim=1)
    assert (error_N <= 2 * worst + 2 * rounding).all()


def test_logits_far_from_the_targets(device):
    """exp(z - z_target) overflows in some rows: those are found and their tiles computed again."""
    inputs = make_inputs(D=24, V=101, device=device, dtype=dtype_on(device), scale=60.0)
    logits_NV = inputs.input.double() @ inputs.linear_weight.double().t()
    target_N = inputs.target.clamp(min=0)[:, None]
    distance_N = logits_NV.amax(1) - logits_NV.gather(1, target_N)[:, 0]
    assert distance_N.max() > 88 > 40 > distance_N.min()
    run(inputs)


@pytest.mark.parametrize("probability", [0.9, 0.999, 0.9999999])
def test_confident_tokens_digits(device, probability):
    """1 - p is formed without a difference of numbers near 1: relative precision at any p."""
    N, D, V = 32, 32, 64
    inputs = make_inputs(N, D, V, device=device, dtype=dtype_on(device), ignored=0)
    gap = torch.logit(torch.tensor(probability)).item() + torch.log(torch.tensor(V - 1.0)).item()
    with torch.no_grad():
        inputs.linear_weight.copy_(torch.eye(V, D) * gap)
        inputs.input.copy_(torch.eye(N, D))
        inputs.target.copy_(torch.arange(N))
    run(inputs, factor=1.1)
    loss = fused(inputs, backend="triton", reduction="none").double()
    exact_gap = inputs.linear_weight[0, 0].double()
    exact = torch.log1p((V - 1) * torch.exp(-exact_gap))
    torch.testing.assert_close(loss, exact.expand(N), rtol=2e-6, atol=0)


def test_frequent_class_and_shifted_slice(device):
    """Many rows of one target, ignored rows among them, and an input that is no view of [N, D]."""
    hidden = torch.randn(5, 31, 24, device=device).to(dtype_on(device)).requires_grad_()
    weight = torch.randn(101, 24, device=device).mul(0.3).to(dtype_on(device)).requires_grad_()
    target = torch.full((5, 30), 7, device=device)
    target[1, ::3], target[2, 5:] = -100, 100
    run(Inputs(hidden[:, :-1], weight, target))


def test_nan_in_ignored_row(device):
    inputs = make_inputs(D=24, V=101, device=device, dtype=dtype_on(device), ignored=0)
    with torch.no_grad():
        inputs.target[3], inputs.input[3] = -100, torch.nan
    actual = differentiate(fused, inputs, backend="triton")
    assert all(part.isfinite().all() for part in actual.values())
    assert actual["input"][3].eq(0).all()


def test_nan_reaches_loss(device):
    inputs = make_inputs(20, 24, 101, device=device, dtype=dtype_on(device), ignored=0)
    with torch.no_grad():
        inputs.input[3] = torch.nan
    assert fused(inputs, backend="triton", reduction="none").isnan().nonzero().flatten().tolist() == [3]


def test_frozen_operands_same_bits(device):
    inputs = make_inputs(D=24, V=101, device=device, dtype=dtype_on(device))
    both = differentiate(fused, inputs, backend="triton")
    again = differentiate(fused, inputs, backend="triton")
    assert all(torch.equal(both[name], again[name]) for name in both)
    for frozen in ("input", "linear_weight"):
        getattr(inputs, frozen).requires_grad_(False)
        alone = differentiate(fused, inputs, backend="triton")
        assert all(torch.equal(alone[name], both[name]) for name in alone)
        getattr(inputs, frozen).requires_grad_(True)


def test_plan_engine_supported(device):
    dtype = dtype_on(device)
    assert planned(make_inputs(9, 24, 31, device=device, dtype=dtype), None, backend="triton").exponentials
    for unfit in (
        make_inputs(9, 23, 31, device=device, dtype=dtype),
        make_inputs(9, 24, 31, device=device, dtype=torch.float16 if device == "cuda" else torch.float64),
    ):
        backend = "triton" if unfit.input.dtype in (*HALVES, torch.float32) else "auto"
        assert not planned(unfit, None, backend=backend).exponentials
    soft = make_inputs(9, 24, 31, device=device, dtype=dtype, probabilities=True)
    assert not planned(soft, None, backend="triton").exponentials
    bent = make_inputs(9, 24, 31, device=device, dtype=dtype)
    assert not planned(bent, None, backend="triton", label_smoothing=0.1, softcap=5.0).exponentials


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_graph_engine_any_address(device, monkeypatch, reduction):
    """A compiled graph is run with tensors that begin elsewhere: a copy of them begins at 16 bytes.
    Without one, where the engine is chosen for the tensors themselves, another is."""
    dtype = dtype_on(device)
    inputs = make_inputs(40, 24, 101, device=device, dtype=dtype)

    def moved(tensor):
        flat = torch.empty(tensor.numel() + 1, dtype=dtype, device=device)
        return flat[1:].view(tensor.shape).copy_(tensor.detach()).requires_grad_()

    elsewhere = replace(inputs, **{name: moved(getattr(inputs, name)) for name in ("input", "linear_weight")})
    assert not planned(elsewhere, None, backend="triton").exponentials
    options = {"reduction": reduction, "backend": "triton"}
    expected = differentiate(fused, inputs, **options)
    monkeypatch.setattr(requirements, "place", lambda tensor: 0)
    assert planned(elsewhere, None, backend="triton").exponentials
    found = differentiate(fused, elsewhere, **options)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


OPTIONS = [
    {"label_smoothing": 0.1},
    {"softcap": 3.0},
    {"logit_scale": 0.7},
    {"z_loss": 0.02},
    {"z_loss": 0.02, "label_smoothing": 0.3, "logit_scale": -1.3},
    {"z_loss": 0.02, "softcap": 5.0, "logit_scale": 1.7},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("learned", [False, True])
def test_options(device, options, reduction, learned):
    inputs, options, upstream = with_options(device, options, reduction, learned, D=24)
    run(inputs, reduction=reduction, upstream=upstream, **options)


@pytest.mark.parametrize("options", all_extended_but(OPTIONS[:2], OPTIONS), ids=str)
def test_options_by_class(device, options):
    """The float32 sum of the weight's gradient does not fit."""
    N, V = several_blocks(device)
    inputs = make_inputs(N, 24, V, device=device, dtype=torch.bfloat16, bias=True, logit_scale=True)
    options = {name: value for name, value in options.items() if name != "logit_scale"}
    least = smallest_workspace(lambda bytes: planned(inputs, bytes, backend="triton", **options))
    assert planned(inputs, least + 20_000, backend="triton", **options).weight_gradient == "class_blocks"
    run(inputs, workspace=least + 20_000, factor=2.0 if device == "cuda" else 4.0, **options)


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"logit_scale": 0.7}], ids=str)
@pytest.mark.parametrize("given", [(1,), (0, 1, 2)])
@pytest.mark.parametrize("scale", [2.0, 60.0])
def test_log_probs(device, options, given, scale):
    inputs = make_inputs(D=24, V=101, device=device, dtype=dtype_on(device), bias=bool(options), scale=scale)
    upstream = [torch.randn(inputs.leading, device=device) if place in given else None for place in range(3)]
    actual = differentiate_log_probs(fused_log_probs, inputs, upstream, backend="triton", **options)
    check_log_probs(actual, inputs, upstream, **options)
