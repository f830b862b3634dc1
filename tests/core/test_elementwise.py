"""Exponentials in place: their error, what underflows, and which bits depend on the place."""

import pytest
import torch

from lowtide.core.elementwise import exp_, quick_exp_

BOTH = pytest.mark.parametrize("exponential", [exp_, quick_exp_], ids=["exp", "quick"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


@BOTH
@DTYPES
def test_exponential_errors(exponential, dtype):
    """At most 2 units in the last place, and half a unit of x for the base 2."""
    x = -torch.rand(10_000, dtype=torch.float64).mul_(60).to(dtype)
    found, expected = exponential(x.clone()).double(), x.double().exp()
    eps = torch.finfo(dtype).eps
    units = 2 + x.double().abs() * (exponential is quick_exp_)
    assert ((found - expected).abs() <= units * eps * expected).all()


@BOTH
@DTYPES
def test_exponential_of_special_values(exponential, dtype):
    lowest = {torch.float32: -104.0, torch.float64: -746.0}[dtype]
    x = torch.tensor([0.0, -torch.inf, 10 * lowest, lowest, torch.nan, torch.inf], dtype=dtype)
    assert exponential(x) is x
    assert x[:4].tolist() == [1, 0, 0, 0]
    assert x[4].isnan()
    assert x[5] == torch.inf


@DTYPES
def test_exponential_is_zero_or_a_normal_number(dtype):
    least = torch.finfo(dtype).tiny
    x = torch.linspace(-1.1, -0.9, 5001, dtype=dtype).mul_(-torch.tensor(least, dtype=dtype).log())
    found, expected = exp_(x.clone()), x.exp()
    assert torch.equal(found, expected.where(expected > 4 * least, 0))


@pytest.mark.skipif(
    not torch.backends.mkl.is_available(), reason="without MKL torch's exp has loops of its own"
)
@DTYPES
def test_exponential_bits_do_not_depend_on_the_place(dtype):
    x = -torch.rand(2048, dtype=dtype).mul_(20)
    whole = exp_(x.clone())
    for start, end in ((0, 1), (0, 17), (3, 20), (1, 2047)):
        assert torch.equal(exp_(x[start:end].clone()), whole[start:end])
