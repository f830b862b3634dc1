"""Fingerprints by which ranks compare tensors on their devices (ranks/equal_values.py).

modes/errors.py has what a call does with them, on several cards.
"""

import pytest
import torch

from lowtide.ops.linear_cross_entropy.ranks.equal_values import fingerprint, sentence

DTYPES = (torch.long, torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool)


def _drawn(dtype, size):
    generator = torch.Generator().manual_seed(3)
    if dtype == torch.bool:
        return torch.rand(size, generator=generator) < 0.5
    if dtype == torch.long:
        return torch.randint(50_000, size, generator=generator)
    return torch.randn(size, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fingerprint_of_equal_numbers(dtype):
    """Numbers count, not how they lie in memory."""
    tensor = _drawn(dtype, (6, 50))
    expected = fingerprint(tensor)
    assert expected.shape == ()
    for same in (tensor.clone(), tensor.t().contiguous().t(), tensor.repeat(1, 2)[:, :50], tensor.flatten()):
        assert fingerprint(same) == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_fingerprint_of_other_numbers(dtype):
    """One number, the order of two, and a number more make another fingerprint, each of its own."""
    tensor = _drawn(dtype, (300,))
    found = {fingerprint(tensor).item()}
    for place in range(300):
        other = tensor.clone()
        other[place] = ~other[place] if dtype == torch.bool else other[place] + 1
        found.add(fingerprint(other).item())
    assert len(found) == 301
    swapped = tensor.clone()
    first, second = 0, int((tensor != tensor[0]).nonzero()[0])
    swapped[[first, second]] = tensor[[second, first]]
    found.add(fingerprint(swapped).item())
    assert len(found) == 302


def test_fingerprint_of_sums_alike():
    """Targets with the same sum, and the same sum of numbers times their places."""
    target = torch.arange(24)
    moved = target + torch.tensor([1, -2, 1] + [0] * 21)
    assert target.sum() == moved.sum()
    assert (target * torch.arange(24)).sum() == (moved * torch.arange(24)).sum()
    assert fingerprint(target) != fingerprint(moved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fingerprint_of_other_signs(dtype):
    """The highest bit counts at each place, alone and beside that of another place."""
    tensor = _drawn(dtype, (100,))
    signs = torch.eye(100, dtype=dtype).mul_(-2).add_(1)
    changed = [tensor, *(tensor * signs), *(tensor * signs[0] * signs[1:])]
    assert len({fingerprint(each).item() for each in changed}) == 200
    for number in tensor:
        assert fingerprint(number) != fingerprint(-number)


def test_fingerprint_of_numbers_alone():
    """NaN is NaN, and 0 is not -0: bits count."""
    nan, zero = torch.tensor(torch.nan), torch.tensor(0.0)
    assert fingerprint(nan) == fingerprint(nan.clone())
    assert fingerprint(zero) != fingerprint(-zero)
    assert fingerprint(torch.empty(0)) == 0


@pytest.mark.parametrize("name", ["target", "row_weight", "ignored", "normalizer", "logit_scale"])
def test_sentence(name):
    assert sentence(name).startswith(f"{name} must be the same on all ranks of the group")
