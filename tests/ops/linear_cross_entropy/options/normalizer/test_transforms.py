"""Derivatives and transforms of a mean with a normaliser, traced and compiled."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.ops.linear_cross_entropy.definition.head import Options
from lowtide.ops.linear_cross_entropy.operator.fake import with_new_graph_facts
from tests.ops.linear_cross_entropy import kinds
from tests.ops.linear_cross_entropy.calls import make_call
from tests.ops.linear_cross_entropy.options.helpers import WARNINGS
from tests.ops.linear_cross_entropy.options.normalizer.helpers import COUNT
from tests.support.loss import dense, differentiate, fused, make_inputs

pytestmark = WARNINGS


def test_number_not_read_while_traced(device):
    """A graph of make_fx divides by the normaliser that it is given."""
    inputs = make_inputs(device=device)
    target = inputs.target

    def loss(input, weight, normalizer):
        return lowtide.linear_cross_entropy(input, weight, target, normalizer=normalizer)

    leaves = inputs.input.detach(), inputs.linear_weight.detach()
    graph = make_fx(loss)(*leaves, torch.tensor(9.0))
    exact = F.cross_entropy(leaves[0] @ leaves[1].t(), target, reduction="sum") / 5
    torch.testing.assert_close(graph(*leaves, torch.tensor(5.0)), exact, rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", kinds.KINDS)
def test_derivatives_first_and_second_order(device, kind):
    inputs, options = kinds.small(device, kind)
    loss, values = kinds.loss_of_leaves(inputs, normalizer=COUNT, **options)
    leaves = tuple(value.requires_grad_() for value in values)
    assert torch.autograd.gradcheck(loss, leaves, fast_mode=True, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(loss, leaves, fast_mode=True)


@pytest.mark.parametrize("kind", kinds.KINDS)
@pytest.mark.parametrize("transform", ["grad", "jvp", "hessian", "create_graph"])
def test_transforms(device, transform, kind):
    inputs, options = kinds.small(device, kind)

    def transformed(loss, values):
        places = tuple(range(len(values)))
        if transform == "jvp":
            return torch.func.jvp(loss, values, tuple(value.cos() for value in values))
        if transform == "create_graph":
            leaves = [value.requires_grad_() for value in values]
            first = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
            return torch.autograd.grad(sum(each.square().sum() for each in first), leaves)
        if transform == "grad":
            return torch.func.grad(loss, places)(*values)
        return [block for row in torch.func.hessian(loss, (0, 1))(*values) for block in row]

    ours, values = kinds.loss_of_leaves(inputs, normalizer=COUNT, **options)
    truth, _ = kinds.loss_of_leaves(inputs, dense, normalizer=COUNT, **options)
    kinds.assert_close(transformed(ours, values), transformed(truth, values))


@pytest.mark.parametrize("positions", [(), (2,)])
def test_vmap_over_normalizers(device, positions):
    call = make_call(positions, device=device, ignored=-100)
    x, w, target = call["input"], call["linear_weight"], call["target"]
    counts = torch.tensor([3.0, 5.0, 7.5], dtype=torch.float64, device=device)

    def loss(x, normalizer):
        return lowtide.linear_cross_entropy(x, w, target, normalizer=normalizer)

    found = torch.vmap(torch.func.grad_and_value(loss), (None, 0))(x, counts)
    for k, count in enumerate(counts):
        leaf = x.detach().requires_grad_()
        value = lowtide.linear_cross_entropy(leaf, w, target, reduction="sum") / count
        (gradient,) = torch.autograd.grad(value, leaf)
        kinds.assert_close([each[k] for each in found], [gradient, value])


def test_checkpointing(device):
    inputs = make_inputs(device=device)
    expected = differentiate(fused, inputs, normalizer=9)
    names = list(inputs.leaves())

    def loss(*leaves):
        return fused(replace(inputs, **dict(zip(names, leaves))), normalizer=9)

    leaves = inputs.leaves().values()
    value = checkpoint(loss, *leaves, use_reentrant=False)
    for name, each in zip(names, torch.autograd.grad(value, list(leaves))):
        assert torch.equal(each, expected[name]), name


@pytest.mark.parametrize("positions", [False, True])
def test_opcheck(device, positions):
    call = make_call((3,) if positions else (), device=device)
    count = torch.tensor(7.0, dtype=torch.float64, device=device)
    head = [[call["input"]], [call["linear_weight"]], None, None, call["target"], None, None, count]
    options = Options(compute_dtype=torch.float64)
    arguments = with_new_graph_facts(
        "lowtide::linear_cross_entropy", (*head, (True, True, False, False), *options)
    )
    torch.library.opcheck(torch.ops.lowtide.linear_cross_entropy.default, arguments)


def test_compiled(device):
    """One graph serves every count: tensors, floats, integers have one each, besides the first."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    step = torch.compile(
        lambda *leaves, normalizer: loss(*leaves, normalizer), backend=backend, fullgraph=True
    )
    inputs = make_inputs(device=device)

    def loss(x, w, normalizer):
        return fused(replace(inputs, input=x, linear_weight=w), normalizer=normalizer)

    leaves = list(inputs.leaves().values())
    for counts in (
        [3, 5, 7, 9],
        [2.5, 3.5, 4.5, 5.5],
        [torch.tensor(each, device=device) for each in (3, 5, 7)],
    ):
        graphs.clear()
        for count in counts:
            found, expected = step(*leaves, normalizer=count), loss(*leaves, count)
            assert torch.equal(found, expected)
            for one, other in zip(*(torch.autograd.grad(each, leaves) for each in (found, expected))):
                assert torch.equal(one, other)
        assert len(graphs) <= 2
