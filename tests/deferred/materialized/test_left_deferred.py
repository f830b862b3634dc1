"""Logits stay deferred when an unknown attribute is read, a dropout is off, or another tensor is
cast to their dtype.
"""

import pytest
import torch
import torch.nn.functional as F

import lowtide
from tests.deferred.helpers import V, make


def test_attribute_unknown():
    model, tokens, _ = make()
    with lowtide.defer_logits(model):
        logits = model(tokens)[0]
        assert not hasattr(logits, "loss")
        with pytest.raises(AttributeError, match="not an attribute of a tensor"):
            logits.loss  # noqa: B018


def test_dropout_that_is_off_keeps_logits_deferred():
    model, tokens, _ = make()
    with lowtide.defer_logits(model):
        logits = model(tokens)[0]
        with torch.no_grad():
            assert F.dropout(logits, 0.0, True) is logits
            assert F.dropout(logits, 0.3, training=False) is logits
        assert logits.requires_grad


def test_attribute_of_hidden_states_is_the_tensors():
    class Scaled(torch.nn.Linear):
        def forward(self, hidden):
            return super().forward(hidden) * getattr(hidden, "own_scale", 7.0)

    head, hidden = Scaled(8, V, bias=False), torch.randn(4, 8)
    hidden.own_scale = 0.5
    target = torch.arange(4)
    expected = F.cross_entropy(head(hidden), target)
    with lowtide.defer_logits(head, head=head):
        found = F.cross_entropy(head(hidden), target)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_tensor_cast_to_dtype_of_logits_keeps_them_deferred(dtype):
    model, tokens, _ = make(dtype=torch.float64)
    with lowtide.defer_logits(model) as deferral:
        logits = model(tokens)[0]
        mask = torch.arange(3, dtype=dtype)
        for found in (mask.to(logits), mask.type_as(logits)):
            assert found.dtype == torch.float64
            assert found.tolist() == [0, 1, 2]
        assert deferral.materialized == {}
