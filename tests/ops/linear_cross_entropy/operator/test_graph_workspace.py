"""The workspace that a graph remembers: the caller's, or the default of the device it runs on."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import lowtide
from lowtide.ops.linear_cross_entropy.definition.head import Head, Labels, Options
from lowtide.ops.linear_cross_entropy.operator import planner
from lowtide.ops.linear_cross_entropy.operator.arguments import call_of
from lowtide.ops.linear_cross_entropy.operator.fake import with_new_graph_facts, workspace_of
from lowtide.ops.linear_cross_entropy.planning.division.workspace import LEAST_ROOM

MIB = 1 << 20
NEEDS_GRAD = 4 + len(Labels._fields)  # the place of this argument of the operator


def arguments(workspace, N=40, D=8, V=100):
    head = [[torch.randn(N, D)], [torch.randn(V, D)], None, None]
    options = Options(workspace=workspace, backend="torch")
    return [*head, *Labels(torch.randint(V, (N,))), (True, True, False, False), *options]


def test_workspace_of_caller_kept():
    call = with_new_graph_facts("lowtide::linear_cross_entropy", arguments(5 * MIB))
    head = Head((call[0][0],), (call[1][0],))
    labels, options = Labels(*call[4:NEEDS_GRAD]), Options(*call[NEEDS_GRAD + 1 :])
    planned = call_of(head, labels, call[NEEDS_GRAD], options, log_probs=False)
    assert planner.make_plan(planned).workspace == 5 * MIB


def test_graph_facts_of_other_device():
    """None stays None, so that the other device's default is its own."""
    told = with_new_graph_facts("lowtide::linear_cross_entropy", arguments(None))
    assert Options(*told[NEEDS_GRAD + 1 :]).workspace is None
    with FakeTensorMode(allow_non_fake_inputs=True):
        there = list(told)
        for place in (0, 1):
            there[place] = [torch.empty(told[place][0].shape, device="cuda")]
        there[4] = torch.empty(told[4].shape, dtype=torch.long, device="cuda")
        again = with_new_graph_facts("lowtide::linear_cross_entropy", there)
        assert LEAST_ROOM["cpu"] < workspace_of("lowtide::linear_cross_entropy", again)


def test_graph_keeps_default():
    """There N may be a symbol."""
    seen = []

    def backend(graph, inputs):
        for node in graph.graph.nodes:
            if node.target is torch.ops.lowtide.linear_cross_entropy.default:
                seen.append(Options(*node.args[NEEDS_GRAD + 1 :]))
        return graph.forward

    x, w, target = torch.randn(40, 8), torch.randn(100, 8), torch.randint(100, (40,))
    torch.compile(lowtide.linear_cross_entropy, backend=backend, fullgraph=True)(x, w, target)
    torch.compiler.reset()
    assert [(each.dense, each.workspace) for each in seen] == [(None, None)]
