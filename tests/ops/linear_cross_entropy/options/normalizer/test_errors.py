"""What is refused as a normalizer."""

import re

import pytest
import torch

import lowtide
from tests.ops.linear_cross_entropy.options.helpers import WARNINGS

pytestmark = WARNINGS


t, x, w = torch.arange(4), torch.randn(4, 3), torch.randn(5, 3)


@pytest.mark.parametrize(
    ("changed", "kind", "message"),
    [
        ({"reduction": "sum"}, ValueError, "normalizer is what reduction='mean' divides the sum by"),
        ({"reduction": "none"}, ValueError, "leave normalizer out and divide the result"),
        ({"normalizer": 0}, ValueError, "normalizer must be a finite number above 0, got 0"),
        (
            {"normalizer": -3.0},
            ValueError,
            "normalizer must be a finite number above 0, got -3.0; "
            "pass lowtide.tokens_per_rank(target), or leave it out",
        ),
        ({"normalizer": float("nan")}, ValueError, "normalizer must be a finite number above 0, got nan"),
        ({"normalizer": float("inf")}, ValueError, "normalizer must be a finite number above 0, got inf"),
        ({"normalizer": 1 << 2000}, ValueError, "normalizer must be a number that a float can hold"),
        ({"normalizer": True}, TypeError, "normalizer must be a float, got True"),
        ({"normalizer": "3"}, TypeError, "normalizer must be a float, got '3'"),
        ({"normalizer": torch.ones(2)}, ValueError, "a 0-d tensor of one, got torch.float32 of shape [2]"),
        ({"normalizer": torch.tensor(True)}, ValueError, "a 0-d tensor of one, got torch.bool"),
        ({"normalizer": torch.tensor(1j)}, ValueError, "a 0-d tensor of one, got torch.complex64"),
        ({"normalizer": torch.tensor(1.0, device="meta")}, ValueError, "must be on input's device (cpu)"),
        ({"normalizer": torch.tensor(1.0, requires_grad=True)}, ValueError, "pass normalizer.detach()"),
        (
            {"normalizer": torch.tensor(-3.0)},
            ValueError,
            "a finite number above 0, or 0 for no token, got -3.0; pass lowtide.tokens_per_rank(target), or",
        ),
        ({"normalizer": torch.tensor(-3)}, ValueError, "a finite number above 0, or 0 for no token, got -3"),
        ({"normalizer": torch.tensor(torch.nan)}, ValueError, "above 0, or 0 for no token, got nan"),
        ({"normalizer": torch.tensor(torch.inf)}, ValueError, "above 0, or 0 for no token, got inf"),
    ],
    ids=str,
)
def test_errors(changed, kind, message):
    for weight, target in ((w, t), (w[:, None].expand(5, 2, 3), t[:, None].expand(4, 2))):
        with pytest.raises(kind, match=re.escape(message)):
            lowtide.linear_cross_entropy(x, weight, target, **{"normalizer": 3} | changed)
