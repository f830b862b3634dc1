"""einops takes deferred logits, which are not tensors by their class."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from tests.deferred.helpers import check, make
from tests.support.graphs import needs_tracing

einops = pytest.importorskip("einops")


@pytest.mark.parametrize("pattern", ["b n c -> b c n", "b n c -> (b n) c", "b n c -> n c b"])
def test_rearrange(pattern):
    model, tokens, targets = make()
    rows = pattern.split("-> ")[1].replace(" c", "")

    def use(model):
        logits = einops.rearrange(model(tokens)[0], pattern)
        return F.cross_entropy(logits, einops.rearrange(targets, f"b n -> {rows}"), ignore_index=-1)

    check(model, use)


class Rearranging(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, targets):
        logits = einops.rearrange(self.model(tokens)[0], "b n c -> b c n")
        return F.cross_entropy(logits, targets, ignore_index=-1)


@needs_tracing
def test_rearrange_compiled():
    model, tokens, targets = make()
    model = Rearranging(model)
    expected = model(tokens, targets)
    torch._dynamo.reset()
    with lowtide.defer_logits(model) as deferral:
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(tokens, targets), expected)
    assert deferral.fused == 1
