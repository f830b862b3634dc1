"""A mean or sum over several positions: one operator, three products for each.

Shapes: N rows, D features, V classes, P positions.
"""

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import lowtide
from lowtide.memory import peak_memory
from lowtide.ops.linear_cross_entropy.definition.head import Options
from lowtide.ops.linear_cross_entropy.operator.fake import with_new_graph_facts, workspace_of
from tests.ops.linear_cross_entropy.calls import make_call, outcome
from tests.support.cuda_graphs import captured

LOSS = torch.ops.lowtide.linear_cross_entropy.default
N, D, V, P = 24, 16, 40, 3
WANTED = [(True, True, True, True), (True, False, False, False), (False, True, False, False), (False,) * 4]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def operands(device, *, probabilities=False, dtype=torch.float32):
    torch.manual_seed(0)
    x_ND, w_VPD, b_VP = torch.randn(N, D), torch.randn(V, P, D), torch.randn(V, P)
    target_NP = torch.randint(V, (N, P))
    target_NP[0], target_NP[3, 1] = -100, -100
    target = torch.rand(N, V, P).softmax(1) if probabilities else target_NP
    scale = torch.tensor(0.7, device=device)
    tensors = (each.to(device, dtype) for each in (x_ND, w_VPD, b_VP))
    x_ND, w_VPD, b_VP = tensors
    return [[x_ND], [w_VPD], b_VP, scale, target.to(device, dtype if probabilities else None)]


@pytest.mark.parametrize("wanted", WANTED, ids=str)
@pytest.mark.parametrize("probabilities", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(device, dtype, reduction, probabilities, wanted):
    options = Options(reduction=reduction, softcap=3.0, z_loss=0.1, compute_dtype=dtype)
    head = operands(device, probabilities=probabilities, dtype=dtype)
    call = with_new_graph_facts("lowtide::linear_cross_entropy", (*head, None, None, None, wanted, *options))
    torch.library.opcheck(LOSS, call)


@pytest.mark.parametrize("frozen", [None, "input", "linear_weight"])
def test_products(device, frozen):
    """The logits, and one for each gradient; four where each row has its own upstream gradient."""
    arguments = make_call((2, 3), device=device)
    (rows, features), classes = arguments["input"].shape, arguments["linear_weight"].shape[0]

    def products(reduction):
        with FlopCounterMode(display=False) as counter:
            leaves = {name: arguments[name].clone() for name in ("input", "linear_weight")}
            for name, leaf in leaves.items():
                leaf.requires_grad_(name != frozen)
            loss = lowtide.linear_cross_entropy(**arguments | leaves, reduction=reduction)
            loss.sum().backward()
        return counter.get_total_flops() / (6 * 2 * rows * features * classes)

    wanted = 2 if frozen is None else 1
    assert products("mean") == products("sum") == 1 + wanted
    assert products("none") == 2 + wanted


@pytest.mark.parametrize("workspace", [None, 60_000])
@pytest.mark.parametrize("factor", [1.0, 1e-6])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_accuracy(device, dtype, factor, workspace):
    """Also where class weights, and so a gradient's largest numbers, differ from position to
    position by 2^20: a float16 gradient has one scale for all."""
    [x_ND], [w_VPD], b_VP, _, target_NP = operands(device, dtype=dtype)
    target_NP = target_NP.clamp(max=V // 2 - 1)
    target_NP[:, 1:] += V // 2 * (target_NP[:, 1:] >= 0)
    weight_V = torch.ones(V, device=device)
    weight_V[: V // 2] = factor
    least = workspace if device == "cpu" or workspace is None else 200_000

    def gradients(dtype, loss):
        leaves = [each.to(dtype).requires_grad_() for each in (x_ND, w_VPD, b_VP)]
        value = loss(*leaves, weight_V.to(torch.promote_types(dtype, torch.float32)))
        return [value.detach(), *torch.autograd.grad(1024 * value, leaves)]

    def ours(x_ND, w_VPD, b_VP, weight_V):
        return lowtide.linear_cross_entropy(
            x_ND, w_VPD, target_NP, linear_bias=b_VP, weight=weight_V, workspace=least
        )

    def dense(x_ND, w_VPD, b_VP, weight_V):
        logits_NVP = torch.einsum("nd,vpd->nvp", x_ND, w_VPD) + b_VP
        return torch.nn.functional.cross_entropy(logits_NVP, target_NP, weight_V.to(logits_NVP.dtype))

    exact = gradients(torch.float64, dense)
    for found, eager, truth in zip(gradients(dtype, ours), gradients(dtype, dense), exact):
        assert (found - truth).norm() <= 2 * (eager - truth).norm()


def test_rounding_matches_single_head(device):
    """Each position's part of the weight's gradient has the bits of its own call, by one engine.

    Left to itself, a call of its own takes the exponentials engine on Hopper, which rounds other
    numbers.
    """
    [x_ND], [w_VPD], _, _, target_NP = operands(device, dtype=torch.bfloat16)
    x_ND, w_VPD = x_ND.requires_grad_(), w_VPD.requires_grad_()
    options = {"reduction": "sum", "backend": "torch"}
    loss = lowtide.linear_cross_entropy(x_ND, w_VPD, target_NP, **options)
    of_all = torch.autograd.grad(loss, w_VPD)[0]
    total = 0.0
    for p in range(P):
        own = lowtide.linear_cross_entropy(x_ND, w_VPD[:, p], target_NP[:, p], **options)
        assert torch.equal(of_all[:, p], torch.autograd.grad(own, w_VPD)[0][:, p])
        total += own.item()
    assert loss.item() == pytest.approx(total, rel=1e-6)


def test_saved_graph(device):
    """Gradients that wait are read twice, by two upstream gradients."""
    arguments = make_call((3,), device=device, bias=True)
    leaves = {name: arguments[name].clone().requires_grad_() for name in ("input", "linear_weight")}
    loss = lowtide.linear_cross_entropy(**arguments | leaves)
    first = torch.autograd.grad(loss, tuple(leaves.values()), retain_graph=True)
    second = torch.autograd.grad(3 * loss, tuple(leaves.values()))
    for one, three in zip(first, second):
        torch.testing.assert_close(3 * one, three, rtol=1e-12, atol=0)


@pytest.mark.extended
def test_second_order(device):
    arguments = make_call((3,), device=device, bias=True, probabilities=True)

    def loss(x, w, b):
        own = {"input": x, "linear_weight": w, "linear_bias": b}
        return lowtide.linear_cross_entropy(**arguments | own)

    leaves = [arguments[name].requires_grad_() for name in ("input", "linear_weight", "linear_bias")]
    assert torch.autograd.gradgradcheck(loss, leaves)


def leaves_and_loss(device, dtype=torch.float64, rows=N, **options):
    """Input, weight and bias, and the loss as a function of them; and the same, densely."""
    [x_ND], [w_VPD], b_VP, _, target_NP = operands(device, dtype=dtype)
    x_ND, target_NP = x_ND[:rows], target_NP[:rows]

    def ours(x_ND, w_VPD, b_VP):
        return lowtide.linear_cross_entropy(x_ND, w_VPD, target_NP, linear_bias=b_VP, **options)

    def dense(x_ND, w_VPD, b_VP):
        logits_NVP = torch.einsum("nd,vpd->nvp", x_ND, w_VPD) + b_VP
        return torch.nn.functional.cross_entropy(logits_NVP, target_NP, **options)

    return [each.requires_grad_() for each in (x_ND, w_VPD, b_VP)], ours, dense


def test_forward_mode(device):
    leaves, ours, dense = leaves_and_loss(device)
    tangents = tuple(torch.randn_like(leaf) for leaf in leaves)
    found, expected = (torch.func.jvp(each, tuple(leaves), tangents) for each in (ours, dense))
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("way", ["reentrant", "not reentrant", "saved on the CPU"])
def test_saved_tensors_recomputed_or_moved(device, way):
    leaves, ours, dense = leaves_and_loss(device)
    if way == "saved on the CPU":
        with torch.autograd.graph.save_on_cpu():
            loss = ours(*leaves)
    else:
        loss = checkpoint(ours, *leaves, use_reentrant=way == "reentrant")
    loss.backward()
    expected = torch.autograd.grad(dense(*leaves), leaves)
    for leaf, gradient in zip(leaves, expected):
        torch.testing.assert_close(leaf.grad, gradient, rtol=1e-11, atol=1e-13)


def test_autocast(device):
    """Products in bfloat16 on CUDA, in float32 on the CPU; gradients in float32."""
    leaves, ours, dense = leaves_and_loss(device, torch.float32)
    with torch.autocast(device, dtype=torch.bfloat16):
        found, eager = (torch.autograd.grad(each(*leaves), leaves) for each in (ours, dense))
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact = torch.autograd.grad(dense(*wide), wide)
    for one, other, truth in zip(found, eager, exact):
        assert one.dtype == torch.float32
        assert (one - truth).norm() <= 2 * (other - truth).norm()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_cuda_graph(device, reduction):
    if device == "cpu":
        pytest.skip("needs CUDA graphs")
    leaves, ours, _ = leaves_and_loss(device, torch.bfloat16, reduction=reduction)

    def step():
        loss = ours(*leaves)
        return loss.detach(), *torch.autograd.grad(loss.sum(), leaves)

    graph, found = captured(step)
    with torch.no_grad():
        leaves[0].mul_(0.5)
    graph.replay()
    assert all(map(torch.equal, found, step()))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_all_rows_of_one_position_ignored(device, reduction):
    """A mean is over all positions: one without a target adds nothing."""
    arguments = make_call((3,), device=device)
    arguments["target"][:, 1] = -100
    without = arguments | {
        "linear_weight": arguments["linear_weight"][:, ::2],
        "target": arguments["target"][:, ::2],
    }
    names = ("input",)
    whole = outcome(lowtide.linear_cross_entropy, arguments, names, reduction=reduction)
    part = outcome(lowtide.linear_cross_entropy, without, names, reduction=reduction)
    torch.testing.assert_close(whole, part, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("wanted", [True, False], ids=["gradients", "loss"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("workspace", [1 << 20, None])
def test_memory_matches_plan(dtype, workspace, wanted):
    measured, foretold = held(dtype, workspace, wanted, rows=512, classes=2048, positions=3)
    assert 0.7 * foretold <= measured <= foretold


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_row_vectors_memory_not_summed(reduction):
    measured, foretold = held(
        torch.float32, 600_000, False, rows=2048, classes=16, positions=128, reduction=reduction
    )
    assert measured <= foretold


def held(dtype, workspace, wanted, *, rows, classes, positions, reduction="mean", features=64):
    """Bytes beside what is given and returned: what a call takes, and what is said of it."""
    x_ND = torch.randn(rows, features, dtype=dtype)
    w_VPD = torch.randn(classes, positions, features, dtype=dtype)
    b_VP, target_NP = torch.randn(classes, positions, dtype=dtype), torch.randint(classes, (rows, positions))
    target_NP[0, 0] = -100  # so that the CPU copies the rows that count
    options = Options(reduction=reduction, compute_dtype=dtype, workspace=workspace, backend="torch")
    call = (
        [x_ND],
        [w_VPD],
        b_VP,
        None,
        target_NP,
        None,
        None,
        None,
        (wanted, wanted, False, False),
        *options,
    )
    call = with_new_graph_facts("lowtide::linear_cross_entropy", call)
    LOSS(*call)
    with peak_memory("cpu") as peak:
        results = LOSS(*call)
    measured = peak.bytes - sum(each.nbytes for each in results)
    return measured, workspace_of("lowtide::linear_cross_entropy", call)
