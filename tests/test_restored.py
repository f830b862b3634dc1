"""Saved tensors that come back in another layout, as from copying hooks: every operator, engine.

Forward chooses the engine, and what it saves means what that engine says. Backward chooses nothing.
"""

import sys
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import CheckpointError, checkpoint

import lowtide
from lowtide.core.bfloat16_units import gemm
from lowtide.ops.attention import dispatch as attention_dispatch
from lowtide.ops.linear_cross_entropy.operator import planner
from lowtide.ops.linear_cross_entropy.planning import requirements
from lowtide.ops.linear_cross_entropy.planning.remembered import forget
from tests.ops.attention import helpers as attended
from tests.ops.chunked_loss import helpers as chunked
from tests.ops.distillation import helpers as distilled
from tests.ops.linear_cross_entropy.calls import make_call, outcome
from tests.ops.linear_cross_entropy.engines.cpu_exponentials.test_cpu_exponentials import off
from tests.support.graphs import needs_tracing
from tests.support.loss import (
    check,
    check_log_probs,
    differentiate,
    differentiate_log_probs,
    fused,
    fused_log_probs,
    make_inputs,
    skip_unless_runnable,
)
from tests.support.restored import LAYOUTS, Restored

# The interpreter computes with numpy, which warns when exp(z - z_target) overflows at the first
# attempt.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

OPS = sys.modules["lowtide.ops.linear_cross_entropy.operator.ops"]
HALF = {"dtype": torch.bfloat16}
# The arguments of make_inputs, and the options of the call. "strided" is no engine: its operands
# would fit another engine once they are copied.
ENGINES = {
    "logits_torch": ({}, {"backend": "torch"}),
    "half": (HALF, {"backend": "torch"}),
    "strided": (HALF, {}),
    "cpu_exponentials": (HALF, {}),
    "logits_triton": ({}, {"backend": "triton"}),
    "exponentials": ({}, {"backend": "triton"}),
    "soft_targets": ({"probabilities": True}, {"backend": "triton"}),
}
KINDS = ("mean", "sum", "none", "log_probs")
TILED = ("exponentials", "soft_targets")


def inputs_of(engine, device, monkeypatch):
    """Confident tokens: on some engines a row's sum leaves the target out, and is small."""
    made, options = ENGINES[engine]
    if options.get("backend") == "triton":
        skip_unless_runnable("triton", device)
    if engine in TILED:
        from tests.ops.linear_cross_entropy.on_exponentials import dtype_on, put_everywhere

        put_everywhere(device, monkeypatch)
        made = made | {"dtype": dtype_on(device)}
    if engine in ("strided", "cpu_exponentials"):
        monkeypatch.setattr(requirements, "FEWEST_WEIGHTS", 0)
    if engine == "cpu_exponentials" and (device == "cuda" or not gemm.available()):
        pytest.skip("no bfloat16 products of the CPU's own")
    inputs = make_inputs(37, 24, 112, device=device, bias=True, scale=6.0, ignored=0.1, **made)
    if engine == "strided":
        apart = inputs.linear_weight.detach().repeat_interleave(2, 1)[:, ::2]
        inputs = replace(inputs, linear_weight=apart.requires_grad_())
    if not inputs.target.is_floating_point():
        logits_NV = inputs.input.float() @ inputs.linear_weight.float().t() + inputs.linear_bias
        target_N = logits_NV.argmax(1).where(inputs.target >= 0, inputs.target)
        target_N[:5] = 3
        inputs = replace(inputs, target=target_N)
    return inputs, options


@pytest.fixture
def engines(monkeypatch):
    """The engine of each plan that is made."""
    found, make = [], planner.make_plan

    def kept(*arguments):
        made = make(*arguments)
        found.append(made.engine)
        return made

    monkeypatch.setattr(OPS, "make_plan", kept)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ENGINES)
def test_the_loss(device, monkeypatch, engines, engine, kind, layout):
    if kind == "log_probs" and engine in ("soft_targets", "cpu_exponentials"):
        pytest.skip("it is for a loss")
    inputs, options = inputs_of(engine, device, monkeypatch)
    ours, differentiated, checked = fused, differentiate, check
    upstream = torch.randn(37, device=device) if kind == "none" else -0.5
    if kind == "log_probs":
        ours, differentiated, checked = fused_log_probs, differentiate_log_probs, check_log_probs
        upstream = tuple(torch.randn(37, device=device) for _ in range(3))
    else:
        options = options | {"reduction": kind, "z_loss": 0.02}
    with Restored(layout) as restored:  # a forward that is not differentiated saves nothing
        found = differentiated(ours, inputs, upstream, **options)
    plain = differentiated(ours, inputs, upstream, **options)
    assert restored.changed > 0 or layout in ("contiguous", "far")
    assert len(set(engines)) == 1
    if device == "cpu":
        of_logits = "cpu_logits" if gemm.available() else "logits_torch"
        assert engines[0] == {"half": "logits_torch", "strided": of_logits}.get(engine, engine)
    options = {name: value for name, value in options.items() if name != "backend"}
    checked(found, inputs, upstream=upstream, **options)
    same = layout == "contiguous" and engine != "strided"
    for name in plain if same or kind in ("mean", "sum") else ():
        assert torch.equal(found[name], plain[name]), name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_positions(device, reduction, layout):
    arguments = make_call((3,), device=device, rows=24, features=16, bias=True, class_weight=True)
    names = ("input", "linear_weight", "linear_bias")
    upstream = torch.randn(24, 3, dtype=torch.float64, device=device) if reduction == "none" else None
    call = (lowtide.linear_cross_entropy, arguments, names, upstream)
    plain = outcome(*call, reduction=reduction)
    with Restored(layout):
        found = outcome(*call, reduction=reduction)
    for name, tensor in plain.items():
        torch.testing.assert_close(found[name], tensor)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_distillation(device, dtype, reduction, layout):
    inputs = distilled.make_inputs(device=device, dtype=dtype, bias=True)
    upstream = torch.randn(len(inputs.student_input), device=device) if reduction == "none" else 0.3
    arguments = (distilled.fused, inputs, "reverse", upstream)
    with Restored(layout):
        found = distilled.differentiate(*arguments, reduction=reduction)
    distilled.check(found, *arguments[1:], reduction=reduction)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bias", [None, (0, 1, 1, 1)], ids=["plain", "bias"])
@pytest.mark.parametrize("backend", ["auto", "torch", "triton"])
def test_attention(device, backend, bias, layout):
    """One query, whose stride nobody uses, and several."""
    skip_unless_runnable(backend, device)
    for M in (1, 11):
        mask = None if M == 1 else lowtide.attn_bias.LowerTriangularFromBottomRightMask()
        case = attended.make_case(2, M, 23, 2, bias=bias, mask=mask, device=device, p=0.2, seed=1)
        upstream = attended.make_upstream(case)
        plain = attended.differentiate(attended.ours, case, upstream, backend=backend)
        with Restored(layout):
            found = attended.differentiate(attended.ours, case, upstream, backend=backend)
        attended.check(found, case, upstream)
        if layout == "contiguous":
            assert all(torch.equal(found[name], plain[name]) for name in ("out", "logsumexp"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("mode", chunked.MODES)
def test_chunked_loss(device, mode, dtype, layout):
    """Of float16 each chunk's rows have a factor of their own."""
    head, hidden, labels = chunked.make("norm", device=device, dtype=dtype)

    def gradients():
        options = {"chunk_size": 5, "mode": mode}
        loss = lowtide.chunked_loss(chunked.cross_entropy, head, hidden, labels, **options)
        return torch.autograd.grad(0.3 * loss, chunked.leaves(head, hidden))

    plain = gradients()
    with Restored(layout):
        found = gradients()
    for ours, expected in zip(found, plain):
        torch.testing.assert_close(ours, expected)


# The places where decisions are made.


@pytest.fixture
def decisions(monkeypatch):
    """Each decision that is made, not looked up: the loss asks for the backend first."""
    forget()
    found = []

    def count(module, name):
        choose = getattr(module, name)

        def counted(*arguments):
            found.append(choose(*arguments))
            return found[-1]

        monkeypatch.setattr(module, name, counted)

    count(planner, "choose_backend")
    count(attention_dispatch, "choose_backend")
    return found


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_decides_once(device, decisions, kind, bias):
    """One without a bias is remembered as a whole as well."""
    inputs = make_inputs(device=device, bias=bias)
    loss = fused_log_probs(inputs).entropy if kind == "log_probs" else fused(inputs, reduction=kind)
    assert len(decisions) == 1
    loss.sum().backward()
    assert len(decisions) == 1


@pytest.mark.parametrize(("reduction", "times"), [("mean", 1), ("none", 3)])
def test_positions_decide_once(device, decisions, reduction, times):
    """Without a reduction each is a call of its own."""
    arguments = make_call((3,), device=device)
    arguments["input"].requires_grad_()
    loss = lowtide.linear_cross_entropy(**arguments, reduction=reduction)
    assert len(decisions) == times
    loss.sum().backward()
    assert len(decisions) == times


def test_attention_decides_once(device, decisions):
    query = torch.randn(1, 9, 2, 8, device=device, requires_grad=True)
    out = lowtide.memory_efficient_attention(query, query, query, p=0.2)
    assert len(decisions) == 1
    out.sum().backward()
    assert len(decisions) == 1


@pytest.mark.parametrize("made_off", [True, False])
@pytest.mark.parametrize("compared", ["default", "none"])
def test_checkpoint_chooses_again(monkeypatch, compared, made_off):
    """It computes anew what backward reads, here where another engine runs. Which one they are from
    the statistics say themselves; a checkpoint that compares them with the first ones refuses."""
    inputs, _ = inputs_of("cpu_exponentials", "cpu", monkeypatch)
    leaves = inputs.leaves()

    def loss(*tensors):
        return fused(replace(inputs, **dict(zip(leaves, tensors))), reduction="none")

    with off(monkeypatch, made_off):
        loss_N = checkpoint(loss, *leaves.values(), use_reentrant=False, determinism_check=compared)
    with off(monkeypatch, not made_off):
        if compared == "default":
            with pytest.raises(CheckpointError, match="different metadata"):
                loss_N.sum().backward()
            return
        found = torch.autograd.grad(loss_N, tuple(leaves.values()), torch.ones_like(loss_N))
    check({"loss": loss_N.detach(), **dict(zip(leaves, found))}, inputs, reduction="none")


@needs_tracing
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled_call(monkeypatch, engines, reduction, layout):
    inputs, _ = inputs_of("strided", "cpu", monkeypatch)
    torch.compiler.reset()
    compiled = torch.compile(fused, backend="aot_eager", fullgraph=True)
    upstream = torch.randn(37) if reduction == "none" else -0.5
    with Restored(layout):
        found = differentiate(compiled, inputs, upstream, reduction=reduction)
    assert set(engines) == {"cpu_logits" if gemm.available() else "logits_torch"}
    check(found, inputs, upstream=upstream, reduction=reduction)
    torch.compiler.reset()
