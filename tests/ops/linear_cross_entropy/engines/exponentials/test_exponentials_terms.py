"""Two linear terms on the path without a pass over logits, and a weight gradient of one product.

The path runs on a card as it is, on the CPU through the interpreter (test_exponentials.py).
"""

import sys
from dataclasses import replace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests.support.loss import (
    check,
    check_log_probs,
    differentiate,
    differentiate_log_probs,
    make_inputs,
    planned,
    workspace_for,
)

pytest.importorskip("triton")

from lowtide.memory import peak_memory
from lowtide.ops.linear_cross_entropy.definition.head import Head
from lowtide.ops.linear_cross_entropy.dispatch import cross_entropy, log_probs
from lowtide.ops.linear_cross_entropy.engines.exponentials import engine
from lowtide.ops.linear_cross_entropy.engines.gemm import triton as tiles
from lowtide.ops.linear_cross_entropy.engines.weight_gradient import accumulators
from lowtide.ops.linear_cross_entropy.operator import planner as plan
from lowtide.ops.linear_cross_entropy.planning import byte_counts, requirements
from tests.ops.linear_cross_entropy.engines.exponentials.test_exponentials import OPTIONS
from tests.ops.linear_cross_entropy.on_exponentials import (  # noqa: F401
    dtype_on,
    everywhere,
    run,
    tokens_are_few,
    with_options,
)
from tests.ops.linear_cross_entropy.options.test_several_terms import in_terms
from tests.support.extended import all_extended_but

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

ROOM = 1 << 24  # for a single GEMM; by default a call so small may hold no more than the dense one


@pytest.fixture(autouse=True)
def any_number_of_tokens(everywhere, monkeypatch):  # noqa: F811
    """Is few."""
    tokens_are_few(monkeypatch, True)


@pytest.fixture
def taken(monkeypatch):
    """How many terms each sweep of the path had."""
    found, sweep = [], engine.ExponentialsEngine.walk_tokens

    def counted(self, *arguments, **options):
        found.append(len(self.operands))
        return sweep(self, *arguments, **options)

    monkeypatch.setattr(engine.ExponentialsEngine, "walk_tokens", counted)
    return found


def run_in_terms(taken, inputs, widths=(24, 8), *, upstream=1.0, factor=2.0, **options):
    found = differentiate(in_terms(cross_entropy, widths), inputs, upstream, backend="triton", **options)
    check(found, inputs, upstream=upstream, factor=factor, **options)
    assert taken
    assert set(taken) == {len(widths)}


def test_second_term_fits_one_block():
    assert requirements.SECOND_FEATURES == tiles.BLOCK_D


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("chunks", [1, 4])
def test_two_terms(device, taken, reduction, chunks):
    N = 70
    inputs = make_inputs(N, 32, 101, device=device, dtype=dtype_on(device))
    workspace = None
    if chunks > 1:
        workspace = workspace_for(inputs, lambda plan: plan.rows >= N // chunks, backend="triton")
    upstream = torch.randn(N, device=device) if reduction == "none" else -0.5
    run_in_terms(taken, inputs, reduction=reduction, upstream=upstream, workspace=workspace)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("reduction", "learned"), [("mean", True), ("none", False)])
def test_two_terms_with_options(device, taken, options, reduction, learned):
    inputs, options, upstream = with_options(device, options, reduction, learned, D=32)
    run_in_terms(taken, inputs, reduction=reduction, upstream=upstream, **options)


@pytest.mark.parametrize(
    "kind", all_extended_but(["single_product"], ["class_blocks", "packed", "single_product"])
)
def test_two_terms_of_a_half_precision_weight(device, taken, kind, monkeypatch):
    """The interpreter truncates: twice the rounding."""
    N = {"packed": 1100 if device == "cuda" else 150}.get(kind, 80)
    inputs = make_inputs(N, 32, 203, device=device, dtype=torch.bfloat16)
    make, kinds = plan.make_plan, set()

    def seen(*arguments):
        made = make(*arguments)
        kinds.add(made.weight_gradient)
        return made

    monkeypatch.setattr(sys.modules["lowtide.ops.linear_cross_entropy.operator.ops"], "make_plan", seen)
    workspace = ROOM
    if kind != "single_product":
        part = replace(
            inputs,
            input=inputs.input[:, :24].detach().requires_grad_(),
            linear_weight=inputs.linear_weight[:, :24].detach().requires_grad_(),
        )
        workspace = workspace_for(part, lambda plan: plan.weight_gradient == kind, backend="triton")
        workspace += 40_000 if kind == "class_blocks" else 203 * 8 * 6 + N * 200
    run_in_terms(taken, inputs, workspace=workspace, factor=2.0 if device == "cuda" else 4.0)
    assert kinds == {kind}


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}], ids=str)
@pytest.mark.parametrize("scale", [2.0, 60.0])
def test_log_probs_of_two_terms(device, taken, options, scale):
    inputs = make_inputs(D=32, V=101, device=device, dtype=dtype_on(device), bias=bool(options), scale=scale)
    upstream = [torch.randn(inputs.leading, device=device) for _ in range(3)]
    function = in_terms(log_probs, (24, 8))
    found = differentiate_log_probs(function, inputs, upstream, backend="triton", **options)
    check_log_probs(found, inputs, upstream, **options)
    assert set(taken) == {2}


@pytest.mark.parametrize("widths", [(16, 16, 8), (8, 80), (24, 4)])
def test_terms_unsupported(device, taken, widths):
    """They take the other one, and are as exact. In half precision 4 features are padded to 8."""
    inputs = make_inputs(9, sum(widths), 31, device=device, dtype=dtype_on(device))
    check(differentiate(in_terms(cross_entropy, widths), inputs, backend="triton"), inputs)
    assert set(taken) == ({2} if widths == (24, 4) and device == "cuda" else set())


# One product of all tokens.


@pytest.fixture(params=[False, True], ids=["24 bits", "formed again"])
def again(request, monkeypatch):
    """Choose whether rows of targets are formed again, or keep 24 bits in a GEMM of our own."""
    monkeypatch.setattr(byte_counts, "FORMED_AGAIN", (1 << 20) * request.param)
    ends_early, begin = set(), accumulators.RoundedProduct.__init__

    def kept(self, *given, **options):
        ends_early.add(options["ends_early"])
        begin(self, *given, **options)

    monkeypatch.setattr(accumulators.RoundedProduct, "__init__", kept)
    yield request.param
    assert ends_early == {not request.param}


@pytest.mark.parametrize(
    "options", all_extended_but([{}], [{}, {"z_loss": 0.02, "softcap": 5.0, "logit_scale": 1.7}]), ids=str
)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_single_product(device, options, reduction, again):
    """The gradient but for targets' rows: frequent ones, ignored ones and the last class too."""
    N, V = 75, 203
    inputs = make_inputs(N, 24, V, device=device, dtype=torch.bfloat16, bias=bool(options))
    with torch.no_grad():
        inputs.target[5:40], inputs.target[41], inputs.target[42] = 7, V - 1, 0
    hidden = {name: value for name, value in options.items() if name != "logit_scale"}
    assert planned(inputs, ROOM, backend="triton", **hidden).weight_gradient == "single_product"
    upstream = torch.randn(N, device=device) if reduction == "none" else -0.5
    factor = 2.0 if device == "cuda" else 4.0
    run(inputs, reduction=reduction, upstream=upstream, factor=factor, workspace=ROOM, **options)


@pytest.mark.parametrize("ignored", ["all", "nearly all"])
def test_single_product_ignored_tokens(device, ignored, again):
    inputs = make_inputs(40, 24, 101, device=device, dtype=torch.bfloat16)
    with torch.no_grad():
        inputs.target.fill_(-100)
        if ignored == "nearly all":
            inputs.target[::6] = torch.tensor([100, 3, 3, 0, 57, 3, 100], device=device)
    assert planned(inputs, ROOM, backend="triton").weight_gradient == "single_product"
    run(inputs, reduction="sum", workspace=ROOM, factor=2.0 if device == "cuda" else 4.0)


def test_single_product_rounds_once(device, again):
    """As exact as a sum in float32 that is rounded at the end."""
    inputs = make_inputs(1100 if device == "cuda" else 96, 48, 150, device=device, dtype=torch.bfloat16)
    few = workspace_for(inputs, lambda plan: plan.weight_gradient == "packed", backend="triton")
    exact = differentiate(in_terms(cross_entropy, (48,)), inputs.to(torch.float64))["linear_weight"]

    def error(workspace):
        found = differentiate(in_terms(cross_entropy, (48,)), inputs, backend="triton", workspace=workspace)
        return ((found["linear_weight"].double() - exact).norm() / exact.norm()).item()

    assert error(None) <= 1.1 * error(few)


def test_single_product_few_targets(device, monkeypatch):
    """Where there are many, most of the weight's gradient would be formed twice."""
    inputs = make_inputs(40, 24, 101, device=device, dtype=torch.bfloat16)
    for classes, kind in ((2, "single_product"), (3, "accumulate")):
        monkeypatch.setattr(plan, "FEWEST_CLASSES_PER_TOKEN", classes)
        assert planned(inputs, ROOM, backend="triton").weight_gradient == kind


@pytest.mark.parametrize("ends_early", [False, True])
def test_single_product_memory_matches_plan(device, ends_early):
    """Beside its operands and the gradient: what is kept of the targets' rows, and vectors."""
    N, D, V, dtype = 70, 512, 400, dtype_on(device)
    exp_NV, x_ND = torch.rand(N, V, device=device).to(dtype), torch.randn(N, D, device=device).to(dtype)
    class_N, order_N = torch.randint(V, (N,), device=device).sort(stable=True)
    hit_N, gradient_VD = torch.randn(N, device=device), torch.empty(V, D, device=device, dtype=torch.bfloat16)
    rounded = accumulators.RoundedProduct(gradient_VD, torch.ones((), device=device), ends_early=ends_early)
    rounded.add_product(exp_NV, x_ND, first=True, last=True)
    with peak_memory(device) as peak:
        rounded.add_target_rows(x_ND, hit_N, class_N, order_N)
    vectors = 4 * V + 64 * N + 4096  # ByteCounts.fixed includes these
    least, most = (N * D, N * D) if ends_early else (N * D * 4, N * (N * dtype.itemsize + D * 4))
    assert least <= peak.bytes <= most + vectors


def test_few_tokens_not_decided_by_symbol():
    """A graph of any length is one, with a sum: how many tokens are few would cut it in two."""
    inputs = make_inputs(8, 24, 640, dtype=torch.bfloat16)
    assert plan.few_tokens(Head((inputs.input,), (inputs.linear_weight,)), "exponentials")
    seen = []

    def trace(hidden):
        traced = Head((hidden,), (inputs.linear_weight,))
        seen.append((type(hidden.shape[0]), plan.few_tokens(traced, "exponentials")))
        return hidden.sum()

    make_fx(trace, tracing_mode="symbolic")(inputs.input.detach())
    assert seen == [(torch.SymInt, False)]
