"""What is refused as a row_weight, and what is not."""

import re

import pytest
import torch

import lowtide
from tests.ops.linear_cross_entropy.options.helpers import WARNINGS

pytestmark = WARNINGS


x, w, t = torch.randn(4, 3), torch.randn(7, 3), torch.tensor([0, 1, -100, 6])
w_K, t_K, r = torch.randn(7, 2, 3), torch.zeros(4, 2).long(), torch.ones(4)
BAD = [
    ("a list", {"row_weight": [1.0] * 4}, TypeError, "row_weight must be a torch.Tensor, got list"),
    ("integers", {"row_weight": t}, TypeError,
     "row_weight must be a floating-point tensor, got torch.int64; use row_weight.float()"),
    ("complex", {"row_weight": r + 0j}, TypeError, "row_weight must be a floating-point tensor"),
    ("sparse", {"row_weight": r.to_sparse()}, TypeError, "row_weight must be a dense tensor"),
    ("too short", {"row_weight": r[:3]}, ValueError,
     "row_weight must have shape [4], one number a row, got [3]; slice it like input and target"),
    ("one number", {"row_weight": r[0]}, ValueError, "row_weight must have shape [4]", "row_weight.expand"),
    ("a column", {"row_weight": r[:, None]}, ValueError, "row_weight must have shape [4]", "got [4, 1]"),
    ("on meta", {"row_weight": r.to("meta")}, ValueError, "row_weight must be on input's device (cpu)"),
    ("with a gradient", {"row_weight": r.clone().requires_grad_()}, ValueError, "pass row_weight.detach()"),
    ("K: flat", {"linear_weight": w_K, "target": t_K, "row_weight": r}, ValueError,
     "row_weight must have shape [4, 2], one number a row, got [4]"),
    ("K: with a gradient", {"linear_weight": w_K, "target": t_K, "row_weight": r[:, None].expand(4, 2)
     .clone().requires_grad_()}, ValueError, "pass row_weight.detach()"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "error", "parts"), [pytest.param(a, e, m, id=i) for i, a, e, *m in BAD]
)
def test_errors(arguments, error, parts):
    with pytest.raises(error, match=re.escape(parts[0])) as caught:
        lowtide.linear_cross_entropy(**{"input": x, "linear_weight": w, "target": t} | arguments)
    assert all(part in str(caught.value) for part in parts)


def test_no_grad_weight_requires_gradient():
    row_weight = r.clone().requires_grad_()
    with torch.no_grad():
        assert lowtide.linear_cross_entropy(x, w, t, row_weight=row_weight).isfinite()


def test_meta():
    call = [each.to("meta") for each in (x, w, t)]
    found = lowtide.linear_cross_entropy(*call, row_weight=r.to("meta"), reduction="none")
    assert found.is_meta
    assert found.shape == (4,)
