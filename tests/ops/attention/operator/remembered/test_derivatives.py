"""Backward of recorded calls: upstream gradients of any layout, retained graphs, saved tensors that
are restored, second derivatives.

Shapes: M queries and keys.
"""

import pytest
import torch

import lowtide
from tests.ops.attention.helpers import INTERPRETED, check, make_upstream
from tests.ops.attention.operator.remembered.helpers import (
    attention_of,
    case_of,
    check_twice,
    least_of,
    repeated,
    results,
    shifted,
)
from tests.support.extended import all_extended_but

pytest.importorskip("triton")
pytestmark = INTERPRETED


UPSTREAM = {
    "expanded": lambda x: x[:1, :1].expand_as(x),
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "shifted": lambda x: shifted(x).detach(),
}


@pytest.mark.parametrize("name", all_extended_but(["expanded"], UPSTREAM))
def test_upstream_gradients_of_any_layout(device, name):
    """Backward of calls that are alike is recorded for each layout."""
    case = case_of(device)
    check_twice(case)
    upstream = UPSTREAM[name](make_upstream(case)[0])
    for _ in range(2):
        for given in ((upstream, None), make_upstream(case)):
            check(results(case, given), case, given)


def test_logsumexp_alone_has_gradients(device, recordings):
    case = least_of(device)
    check_twice(case)
    upstream = (None, make_upstream(case)[1])
    check(results(case, upstream), case, upstream)
    assert len(recordings) == 4


def test_restored_tensors_in_other_strides(device):
    """Hooks on saved tensors may bring them back so."""
    case = case_of(device, bias=(0, 1, 1, 1))
    upstream = make_upstream(case)
    expected = results(case, upstream)

    def turned(tensor):
        return tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor

    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(turned, lambda tensor: tensor):
            check(results(case, upstream), case, upstream)
        found = results(case, upstream)
        for name, each in expected.items():
            assert torch.equal(found[name], each), name


def test_second_derivatives(device):
    case = case_of(device, M=5, N=6, bias=(0, 1, 1, 1))
    repeated(case)
    leaves = list(case.leaves().values())

    def penalty(case, backend):
        given = case.query, case.key, case.value, case.attn_bias
        out = lowtide.memory_efficient_attention(*given, backend=backend)
        first = torch.autograd.grad(out.sin().sum(), list(case.leaves().values()), create_graph=True)
        return torch.autograd.grad(sum(each.square().sum() for each in first), list(case.leaves().values()))

    exact = penalty(case.to(torch.float64), "reference")
    for found, want, leaf in zip(penalty(case, "triton"), exact, leaves):
        assert found.shape == leaf.shape
        torch.testing.assert_close(found.double(), want, rtol=1e-4, atol=1e-5)


def test_graph_that_is_retained(device):
    case = least_of(device)
    repeated(case)
    out = attention_of(case).sum()
    leaves = list(case.leaves().values())
    first = torch.autograd.grad(out, leaves, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(out, leaves)))
