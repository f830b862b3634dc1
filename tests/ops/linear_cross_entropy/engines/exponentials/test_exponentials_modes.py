"""On a card, where the path without a pass runs in bfloat16: its memory by each way to the weight's
gradient, and what may be around a call of it. (The tests of any path have other sizes, which it
refuses.)

Shapes: N tokens, D features, V classes.
"""

from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lowtide.memory import peak_memory
from lowtide.ops.linear_cross_entropy.definition.head import Options
from lowtide.ops.linear_cross_entropy.operator.fake import with_new_graph_facts
from lowtide.ops.linear_cross_entropy.planning.division.workspace import DEFAULT_WORKSPACE
from tests.ops.linear_cross_entropy.kinds import loss_of_leaves
from tests.support.cuda_graphs import captured
from tests.support.loss import check, differentiate, fused, make_inputs, planned, workspace_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Dynamo's own.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),
]

OPS = torch.ops.lowtide
REDUCTIONS = pytest.mark.parametrize("reduction", ["mean", "none"])
OPTIONS = {"softcap": 3.0, "z_loss": 0.1}
# Tokens and classes.
SIZES = {
    "single_product": (64, 8200),
    "accumulate": (2048, 8100),
    "packed": (2048, 8100),
    "class_blocks": (2048, 8100),
}


@pytest.fixture(autouse=True)
def _hopper():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs tensor maps")


def of_all(N=370, V=200, **more):
    return make_inputs(
        N, 24, V, device="cuda", **{"dtype": torch.bfloat16, "bias": True, "logit_scale": True, **more}
    )


def takes_the_path(inputs, **options):
    return planned(inputs, None, backend="auto", **options).exponentials


@REDUCTIONS
@pytest.mark.parametrize("kind", SIZES)
def test_memory(kind, reduction):
    """The workspace, the gradients and the loss: at this kind's least workspace and 4/3 of it."""
    N, V = SIZES[kind]
    inputs = make_inputs(N, 24, V, device="cuda", dtype=torch.bfloat16, bias=True)
    least = workspace_for(inputs, lambda plan: plan.weight_gradient == kind, backend="auto")
    leaves = tuple(inputs.leaves().values())
    upstream = torch.ones(N if reduction == "none" else (), device="cuda")
    for workspace in (least, least + least // 3):
        plan = planned(inputs, workspace, backend="auto")
        assert plan.exponentials
        assert plan.weight_gradient == kind or workspace > least
        for _ in range(2):  # the first compiles
            with peak_memory("cuda") as peak:
                loss = fused(inputs, workspace=workspace, reduction=reduction)
                torch.autograd.grad(loss, leaves, upstream)
        assert peak.bytes <= workspace + sum(leaf.nbytes for leaf in leaves) + loss.nbytes


def test_no_grad_allocates_no_weight_size():
    N, D, V = 256, 512, 32768
    inputs = make_inputs(N, D, V, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        fused(inputs)
        with peak_memory("cuda") as peak:
            fused(inputs)
    assert peak.bytes < V * D // 16


@REDUCTIONS
@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "options"])
def test_cuda_graph(options, reduction):
    inputs = of_all()
    assert takes_the_path(inputs, **options)
    leaves = tuple(inputs.leaves().values())

    def step():
        loss = fused(inputs, reduction=reduction, **options)
        return loss.detach(), *torch.autograd.grad(loss.sum(), leaves)

    graph, found = captured(step)
    with torch.no_grad():
        for tensor in (inputs.target, *leaves):
            tensor.copy_(tensor.flip(0))
    graph.replay()
    assert all(map(torch.equal, found, step()))


@REDUCTIONS
def test_compile_one_graph(reduction, monkeypatch):
    monkeypatch.undo()  # the compiler has its own torch.empty
    torch.compiler.reset()

    def step(inputs):
        return differentiate(fused, inputs, upstream_of(inputs, reduction), reduction=reduction, **options)

    def upstream_of(inputs, reduction):
        return torch.ones(inputs.leading if reduction == "none" else (), device="cuda")

    # A graph has the whole default, and rounds as a call does that has as much.
    options = OPTIONS | {"workspace": DEFAULT_WORKSPACE["cuda"]}
    loss_of = torch.compile(
        lambda *tensors: fused(type(inputs)(*tensors), reduction=reduction, **options), fullgraph=True
    )
    for N in (370, 257):
        inputs = of_all(N)
        leaves = inputs.leaves()
        tensors = (inputs.input, inputs.linear_weight, inputs.target, inputs.linear_bias, None)
        loss = loss_of(*tensors, inputs.logit_scale)
        gradients = torch.autograd.grad(loss.sum(), tuple(leaves.values()))
        expected = step(inputs)
        assert torch.equal(loss, expected["loss"])
        for name, gradient in zip(leaves, gradients):
            assert torch.equal(gradient, expected[name]), name


@REDUCTIONS
def test_opcheck(reduction):
    inputs = of_all()
    head = [
        [inputs.input.detach()], [inputs.linear_weight.detach()], inputs.linear_bias.detach(),
        inputs.logit_scale.detach(), inputs.target,
    ]  # fmt: skip
    options = Options(reduction=reduction, **OPTIONS)
    call = with_new_graph_facts(
        "lowtide::linear_cross_entropy", (*head, None, None, None, (True,) * 4, *options)
    )
    torch.library.opcheck(OPS.linear_cross_entropy.default, call)


@REDUCTIONS
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_and_saved_tensors_moved(reduction, use_reentrant):
    inputs = of_all()
    upstream = torch.randn(inputs.leading, device="cuda") if reduction == "none" else 0.3
    expected = differentiate(fused, inputs, upstream, reduction=reduction, **OPTIONS)
    loss, _ = loss_of_leaves(inputs, reduction=reduction, **OPTIONS)
    leaves = inputs.leaves()
    with torch.autograd.graph.save_on_cpu():
        found = checkpoint(loss, *leaves.values(), use_reentrant=use_reentrant)
    found.backward(torch.as_tensor(upstream, device="cuda", dtype=found.dtype))
    for name, leaf in leaves.items():
        assert torch.equal(leaf.grad, expected[name]), name
        leaf.grad = None


@REDUCTIONS
def test_autocast(reduction):
    """A float32 head, whose gradient is the sum itself; as if its operands had been cast."""
    inputs = of_all(dtype=torch.float32)
    with torch.no_grad():
        inputs.linear_bias.copy_(inputs.linear_bias.bfloat16())
    rounded = replace(inputs.to(torch.bfloat16), logit_scale=inputs.logit_scale)
    assert takes_the_path(rounded)
    upstream = torch.randn(inputs.leading, device="cuda") if reduction == "none" else 0.3
    check(differentiate(fused, rounded, upstream, reduction=reduction), rounded, upstream=upstream,
        reduction=reduction)  # fmt: skip
    expected = differentiate(fused, rounded, upstream, reduction=reduction)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        found = differentiate(fused, inputs, upstream, reduction=reduction)
    torch.testing.assert_close(found["loss"], expected["loss"], rtol=1e-6, atol=1e-6)
    eps = torch.finfo(torch.bfloat16).eps
    for name, leaf in inputs.leaves().items():
        assert found[name].dtype == leaf.dtype
        scale = expected[name].float().abs().max().item()
        torch.testing.assert_close(found[name], expected[name].float(), rtol=eps, atol=eps * scale)
