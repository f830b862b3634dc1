"""The weight's gradient class block by class block on the path without a pass: both sweeps in
several chunks of tokens and several blocks of classes, the last ones cut, whatever sizes a plan
would choose.

How the path runs on the CPU is in test_exponentials.py; there bfloat16 is truncated: twice the
rounding.
"""

import sys
from dataclasses import replace

import pytest
import torch

from tests.support.extended import all_extended_but
from tests.support.loss import (
    Inputs,
    check,
    check_log_probs,
    differentiate,
    differentiate_log_probs,
    fused,
    fused_log_probs,
    make_inputs,
    planned,
    smallest_workspace,
)

pytest.importorskip("triton")

from lowtide.core.matmul import blocks
from lowtide.memory import peak_memory
from lowtide.ops.linear_cross_entropy.dispatch import cross_entropy
from lowtide.ops.linear_cross_entropy.operator import planner
from lowtide.ops.linear_cross_entropy.planning.byte_counts import ClassBlocks, exponentials_stride
from lowtide.ops.linear_cross_entropy.planning.division import class_blocks, cost_model
from tests.ops.linear_cross_entropy.engines.exponentials.test_exponentials import OPTIONS
from tests.ops.linear_cross_entropy.on_exponentials import everywhere, silent  # noqa: F401
from tests.ops.linear_cross_entropy.options.test_several_terms import in_terms

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

# Tokens and classes at a time: of the sweep that makes what belongs to tokens, and of the other;
# and tokens whose exponentials are kept between them, for which there is room up to half the
# features (on a card, all).
SIZES = [(32, 48, 48, 64, 8), (8, 139, 32, 40, 8), (5, 64, 70, 139, 11), (32, 48, 48, 64, 0)]
all_sizes = pytest.mark.parametrize(
    "sizes",
    [SIZES[0], *(pytest.param(each, marks=pytest.mark.extended) for each in SIZES[1:3]), SIZES[3]],
    ids=str,
    indirect=True,
)


@pytest.fixture(params=SIZES[:1], ids=str)
def sizes(request, device, everywhere, monkeypatch):  # noqa: F811
    """All calls have these, times 8 on a card, where tiles are of 128 x 256."""
    make, names = planner.make_plan, ("rows", "chunk_classes", "block_rows", "block_classes", "stored_rows")
    times = 8 if device == "cuda" else 1

    def with_sizes(call):
        made, head = make(call), call.head
        if made.weight_gradient != "class_blocks":
            return made
        most = (*(head.tokens, head.classes) * 2, head.inputs[0].shape[-1])
        return replace(
            made, **{name: min(times * size, m) for name, size, m in zip(names, request.param, most)}
        )

    monkeypatch.setattr(sys.modules["lowtide.ops.linear_cross_entropy.operator.ops"], "make_plan", with_sizes)


def inputs_of(device, **changes) -> Inputs:
    times = 8 if device == "cuda" else 1
    shape = {"N": 70, "D": 24, "V": 139} | {
        name: changes.pop(name) for name in ("N", "D", "V") if name in changes
    }
    sizes = {name: times * size for name, size in shape.items()}
    return make_inputs(**sizes, **({"dtype": torch.bfloat16} | changes), device=device)


def run(inputs: Inputs, *, function=fused, upstream=1.0, **options):
    workspace = small(inputs, **{n: v for n, v in options.items() if n not in ("reduction", "logit_scale")})
    actual = differentiate(function, inputs, upstream, backend="triton", workspace=workspace, **options)
    factor = 2.0 if inputs.input.is_cuda else 4.0
    check(actual, inputs, upstream=upstream, factor=factor, **options)
    return actual


def small(inputs: Inputs, **options) -> int:
    workspace = smallest_workspace(lambda bytes: planned(inputs, bytes, backend="triton", **options))
    found = planned(inputs, workspace + 2000, backend="triton", **options)
    assert found.exponentials
    assert found.weight_gradient == "class_blocks"
    return workspace + 2000


@all_sizes
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_every_reduction(device, sizes, reduction):
    inputs = inputs_of(device, class_weight=True)
    upstream = torch.randn(inputs.leading, device=device) if reduction == "none" else -0.5
    run(inputs, reduction=reduction, upstream=upstream)


@all_sizes
@pytest.mark.parametrize("learned", [False, True])
def test_logits_far_from_the_targets(device, sizes, learned):
    """Rows of all chunks, but not of all row tiles, and not in all blocks."""
    inputs = inputs_of(device, scale=60.0, bias=learned, logit_scale=learned)
    with torch.no_grad():
        inputs.input[: len(inputs.input) // 4] *= 0.01
        inputs.input[-len(inputs.input) // 3 :] *= 0.01
    logits_NV = inputs.input.double() @ inputs.linear_weight.double().t()
    distance_N = logits_NV.amax(1) - logits_NV.gather(1, inputs.target.clamp(min=0)[:, None])[:, 0]
    assert distance_N.max() > 88
    run(inputs)


@pytest.mark.parametrize("options", all_extended_but([OPTIONS[0], OPTIONS[-1]], OPTIONS), ids=str)
@pytest.mark.parametrize(
    ("reduction", "learned", "scale"),
    all_extended_but([("none", False, 2.0)], [("mean", True, 40.0), ("none", False, 2.0)]),
)
def test_options(device, sizes, options, reduction, learned, scale):
    inputs = inputs_of(device, bias=learned, logit_scale=learned, class_weight=True, scale=scale)
    if learned:
        options = {name: value for name, value in options.items() if name != "logit_scale"}
    upstream = torch.randn(inputs.leading, device=device) if reduction == "none" else -0.5
    run(inputs, reduction=reduction, upstream=upstream, **options)


@pytest.mark.parametrize(
    "options",
    all_extended_but([{}, {"softcap": 3.0}], [{}, {"label_smoothing": 0.2}, {"softcap": 3.0}]),
    ids=str,
)
@pytest.mark.parametrize("scale", [2.0, 60.0])
def test_two_terms(device, sizes, options, scale):
    inputs = inputs_of(device, D=32, bias=bool(options), scale=scale)
    first, second = (size * inputs.input.shape[1] // 32 for size in (24, 8))
    part = replace(
        inputs,
        input=inputs.input[:, :first].detach().requires_grad_(),
        linear_weight=inputs.linear_weight[:, :first].detach().requires_grad_(),
    )
    of_second = (inputs.linear_weight.shape[0] + inputs.leading[0]) * second * 6
    workspace = small(part, **options) + of_second + inputs.leading[0] * 200
    found = differentiate(
        in_terms(cross_entropy, (first, second)), inputs, backend="triton", workspace=workspace, **options
    )
    check(found, inputs, factor=2.0 if device == "cuda" else 4.0, **options)


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}], ids=str)
@pytest.mark.parametrize("scale", [2.0, 60.0])
def test_log_probs(device, sizes, options, scale):
    inputs = inputs_of(device, bias=bool(options), scale=scale)
    upstream = [torch.randn(inputs.leading, device=device) for _ in range(3)]
    least = smallest_workspace(
        lambda bytes: planned(inputs, bytes, backend="triton", log_probs=True, **options)
    )
    found = planned(inputs, least + 2000, backend="triton", log_probs=True, **options)
    assert found.weight_gradient == "class_blocks"
    actual = differentiate_log_probs(
        fused_log_probs, inputs, upstream, backend="triton", workspace=least + 2000, **options
    )
    check_log_probs(actual, inputs, upstream, factor=2.0 if device == "cuda" else 4.0, **options)


@pytest.mark.parametrize("frozen", all_extended_but(["input"], ["input", "linear_weight"]))
def test_frozen_operand(device, sizes, frozen):
    inputs = inputs_of(device)
    both = run(inputs)
    getattr(inputs, frozen).requires_grad_(False)
    alone = differentiate(fused, inputs, backend="triton", workspace=small_of_all(inputs))
    for name in alone:
        torch.testing.assert_close(alone[name], both[name], rtol=2**-6, atol=1e-6)


def small_of_all(inputs: Inputs) -> int:
    return smallest_workspace(lambda bytes: planned(inputs, bytes, backend="triton")) + 2000


@pytest.mark.extended
def test_nan_reaches_loss_unless_ignored(device, sizes):
    inputs = inputs_of(device, ignored=0)
    with torch.no_grad():
        inputs.target[3], inputs.input[3], inputs.input[50] = -100, torch.nan, torch.nan
    options = {"backend": "triton", "workspace": small(inputs)}
    assert fused(inputs, reduction="none", **options).isnan().nonzero().flatten().tolist() == [50]
    assert fused(inputs, **options).isnan()
    grad = differentiate(fused, inputs, **options)["input"]
    assert grad[3].eq(0).all()
    assert grad.isfinite().all(1).logical_not().nonzero().flatten().tolist() == [50]


def test_frequent_class_and_strided_input(device, sizes):
    """Many rows of one target, ignored rows among them, and an input that is no view of [N, D]."""
    times = 8 if device == "cuda" else 1
    hidden = torch.randn(5 * times, 15, 24 * times, device=device).bfloat16().requires_grad_()
    weight = torch.randn(139 * times, 24 * times, device=device).mul(0.3).bfloat16().requires_grad_()
    target = torch.full((5 * times, 14), 7, device=device)
    target[1, ::3], target[2, 5:] = -100, 138
    run(Inputs(hidden[:, :-1], weight, target))


@pytest.fixture
def counted(device, silent):  # noqa: F811
    """Tokens, features and classes."""
    return (4096, 512, 16384) if device == "cuda" else (1000, 64, 6000)


EXTRAS = [{}, {"bias": True, "class_weight": True, "logit_scale": True}]


@pytest.mark.parametrize("extras", EXTRAS, ids=["plain", "all"])
@pytest.mark.parametrize(
    "options",
    all_extended_but([{}], [{}, {"label_smoothing": 0.1}, {"softcap": 5.0, "z_loss": 0.1}]),
    ids=str,
)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("room", all_extended_but([1.0, 2.0], [1.0, 1.2, 2.0]))
def test_workspace_kept(device, counted, room, reduction, extras, options):
    N, D, V = counted
    inputs = make_inputs(N, D, V, device=device, dtype=torch.bfloat16, **extras)
    least = smallest_workspace(lambda bytes: planned(inputs, bytes, backend="triton", **options))
    workspace = int(room * least)
    assert planned(inputs, workspace, backend="triton", **options).weight_gradient == "class_blocks"
    upstream = torch.ones((N,) if reduction == "none" else (), device=device)

    def step():
        loss = fused(inputs, workspace=workspace, reduction=reduction, backend="triton", **options)
        return loss.detach(), *torch.autograd.grad(loss, list(inputs.leaves().values()), upstream)

    held = sum(each.nbytes for each in step())
    if device == "cpu":
        held += V * D * 4  # the weight as the interpreter takes it
    with peak_memory(device) as peak:
        step()
    # `least` reserves most for vectors, and not all of it is used.
    assert 0.7 * (workspace - least) <= peak.bytes - held <= workspace


# Sizes that are chosen.


def needs(N=16384, D=4096, V=128256) -> ClassBlocks:
    return ClassBlocks(N, D, V, 128, 2, 2 * D, 4, V // 8, V // 32, 4 * D, 96, 0, 4 * D)


@pytest.mark.parametrize("room", [3 << 20, 60 << 20, 250 << 20, 900 << 20])
@pytest.mark.parametrize(
    ("N", "D", "V"), [(16384, 4096, 128256), (8192, 2304, 256000), (100, 64, 1001), (1, 8, 5), (4096, 16, 9)]
)
def test_sizes_within_memory(room, N, D, V):
    """Of the workspace, and of the gradient, which holds exponentials: a chunk's and kept ones."""
    of = needs(N, D, V)
    found = class_blocks.sizes(of, room, room)
    assert class_blocks.held(of, found) <= room
    assert 0 < found.rows <= N
    assert 0 < found.block_rows <= N
    assert 0 < found.chunk_classes <= V
    assert 0 < found.block_classes <= V
    assert found.rows * exponentials_stride(found.chunk_classes) <= V * D or found.rows == 1
    for classes in blocks(V, found.block_classes):
        width = classes.stop - classes.start
        assert found.stored_rows * exponentials_stride(width) <= width * D


def test_tokens_stored_where_all_fit():
    """There is no product more: D tokens fit in the gradient's memory."""
    for room in (60 << 20, 250 << 20):
        assert class_blocks.sizes(needs(N=4096, D=8192), room, room).stored_rows == 4096


@pytest.mark.parametrize(
    ("N", "D", "V"), [(16384, 4096, 128256), (8192, 2880, 201088), (16384, 2048, 131072)]
)
def test_blocks_fill_waves(N, D, V):
    """In 64 MiB all 132 multiprocessors are at work, on tiles of 128 x 256."""
    found = class_blocks.sizes(needs(N, D, V), 60 << 20, 60 << 20)
    tiles = -(-found.block_rows // 128) * -(-found.block_classes // 256)
    assert tiles / 132 >= 0.95 * -(-tiles // 132)


@pytest.mark.parametrize(
    ("D", "V", "measured"),  # ms of E W with a float32 result on an H200, by numbers of rows
    [
        (2304, 256000, {896: 1.542, 1280: 2.351, 1408: 2.330, 1536: 3.062, 2048: 3.440}),
        (4096, 128256, {1664: 3.025, 2048: 3.001, 2816: 4.581}),
    ],
)
def test_waves_of_measured_products(D, V, measured):
    for rows, ms in measured.items():
        assert 1e3 * cost_model.product_seconds(rows, D, V, 4 * rows * D) == pytest.approx(ms, rel=0.03)
