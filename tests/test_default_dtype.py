"""torch.set_default_dtype decides no result: that of float32 operands is float32.

Shapes: N rows, D features, V classes.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide

N, D, V = 5, 8, 11


def of_reference(x, w, target):
    return lowtide.linear_cross_entropy(x, w, target, backend="reference")


def of_transform(x, w, target):
    return torch.func.vjp(lambda x: lowtide.linear_cross_entropy(x, w, target), x)[0]


def of_divergence(x, w, target):
    ignored = target == 0
    return torch.func.vjp(lambda x: lowtide.distillation.forward_kl(x, w, 2 * x, w, ignored=ignored), x)[0]


def of_deferred_logits(x, w, target):
    """A mean of the losses of chunks."""
    head = nn.Linear(D, V, bias=False, dtype=x.dtype)
    with lowtide.defer_logits(head, head=head):
        return F.cross_entropy(torch.func.functional_call(head, {"weight": w}, (x,)).softmax(-1), target)


@pytest.fixture(params=[torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def default_dtype(request):
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


@pytest.mark.parametrize("ignored", [0, N])
@pytest.mark.parametrize("use", [of_reference, of_transform, of_divergence, of_deferred_logits])
def test_default_dtype_decides_no_result(default_dtype, use, ignored):
    x, w = torch.randn(N, D, dtype=torch.float32), torch.randn(V, D, dtype=torch.float32)
    target = torch.arange(N) + 1
    target[:ignored] = 0 if use is of_divergence else -100
    loss = use(x, w, target)
    assert loss.dtype == torch.float32
    assert loss.isnan() == (ignored == N)
