"""What row_weight costs: products and memory.

Shapes: N tokens, D features, V classes.
"""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lowtide.memory import peak_memory
from lowtide.ops.linear_cross_entropy.definition.head import Options
from lowtide.ops.linear_cross_entropy.operator.fake import with_new_graph_facts, workspace_of
from tests.ops.linear_cross_entropy.options.helpers import WARNINGS
from tests.ops.linear_cross_entropy.options.row_weight.helpers import weighted
from tests.ops.linear_cross_entropy.options.test_options import REDUCTIONS
from tests.support.extended import all_extended_but
from tests.support.loss import fused, make_inputs, smallest_workspace

pytestmark = WARNINGS


def test_products(device):
    """A mean or sum takes three products, and four if each row has its own upstream gradient."""
    inputs, _ = weighted(37, 19, 63, device=device)

    def products(reduction):
        with FlopCounterMode(display=False) as counter:
            fused(inputs, reduction=reduction).sum().backward()
        return counter.get_total_flops() / (2 * 37 * 19 * 63)

    assert [products(reduction) for reduction in REDUCTIONS] == [3, 3, 4]


@pytest.mark.parametrize("probabilities", all_extended_but([False], [False, True]))
@pytest.mark.parametrize("dtype", all_extended_but([torch.float32], [torch.float32, torch.bfloat16]))
@pytest.mark.parametrize("reduction", all_extended_but(["sum"], REDUCTIONS))
def test_memory(device, reduction, dtype, probabilities):
    """Row weights add only vectors of N numbers, in the workspace, and leave the plan alone."""
    N, D, V = 512, 4, 64
    inputs = make_inputs(N, D, V, device=device, dtype=dtype, probabilities=probabilities, row_weight=True)
    plain, peaks = replace(inputs, row_weight=None), []
    least = smallest_workspace(lambda size: fused(plain, reduction=reduction, workspace=size))
    assert least == smallest_workspace(lambda size: fused(inputs, reduction=reduction, workspace=size))
    for each in (plain, inputs):
        fused(each, reduction=reduction, workspace=least).sum().backward()
        for leaf in inputs.leaves().values():
            leaf.grad = None
        upstream = torch.ones(() if reduction != "none" else N, device=device)
        with peak_memory(device) as peak:
            loss = fused(each, reduction=reduction, workspace=least)
            loss.backward(upstream)
        peaks.append(peak.bytes)
        for leaf in inputs.leaves().values():
            leaf.grad = None
        assert peak.bytes <= least + sum(leaf.nbytes for leaf in inputs.leaves().values()) + loss.nbytes
    assert peaks[1] - peaks[0] <= 3 * 4 * N


def test_memory_matches_plan(device):
    inputs, options = make_inputs(device=device, row_weight=True), Options(workspace=1 << 20)
    head = [[inputs.input.detach()], [inputs.linear_weight.detach()], None, None, inputs.target, None]
    found = {
        workspace_of(
            "lowtide::linear_cross_entropy",
            with_new_graph_facts(
                "lowtide::linear_cross_entropy", (*head, each, None, (True, True, False, False), *options)
            ),
        )
        for each in (None, inputs.row_weight)
    }
    assert len(found) == 1
