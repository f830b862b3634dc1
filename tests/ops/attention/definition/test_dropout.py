"""Dropout: its bits, its rate, and that nothing but (seed, b, h, i, j) decides."""

import math

import pytest
import torch

import lowtide
from lowtide import attn_bias as masks
from lowtide.ops.attention.definition.dropout import column_keys, keep_mask, limit, row_keys
from lowtide.ops.attention.torch_backend import tiling
from tests.ops.attention.helpers import differentiate, make_case, make_upstream, ours

WORD = (1 << 32) - 1


def mixed(x):
    x ^= x >> 16
    x = x * 0x7FEB352D & WORD
    x ^= x >> 15
    x = x * 0x846CA68B & WORD
    return x ^ x >> 16


def chained(key, value):
    return mixed(((key + 0x9E3779B9) & WORD) ^ value)


def bits(seed, b, h, i, j):
    """In Python's integers, as docs/explanation/attention.md writes it down."""
    own = chained(mixed(seed & WORD), seed >> 32 & WORD)
    row = chained(chained(chained(own, b), h), i)
    column = chained(chained(own, 0x9E3779B9), j)
    return mixed(row ^ column)


@pytest.mark.parametrize("seed", [0, 1, -1, 1 << 40, 0x123456789ABCDEF])
def test_random_bits(device, seed):
    B, H, M, N, p = 2, 3, 5, 7, 0.4
    tensor = torch.tensor(seed, device=device)
    found = keep_mask(row_keys(tensor, B, H, M)[..., None], column_keys(tensor, N), p)
    for b, h, i, j in torch.cartesian_prod(*map(torch.arange, (B, H, M, N))).tolist():
        signed = (bits(seed, b, h, i, j) ^ 1 << 31) - (1 << 31)
        assert found[b, h, i, j].item() == (signed > limit(p)), (b, h, i, j)


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_dropout_rate(p):
    """Of n independent scores, by the binomial law: n p, and within 5 standard deviations; so along
    each axis, and for pairs of neighbours."""
    seed = torch.tensor(7)
    dropped = ~keep_mask(row_keys(seed, 2, 4, 256)[..., None], column_keys(seed, 512), p)

    def holds(events, rate):
        n = events.numel()
        assert abs(events.sum().item() - n * rate) <= 5 * math.sqrt(n * rate * (1 - rate)) + 1

    holds(dropped, p)
    for part in (*dropped.unbind(0), *dropped.unbind(1), *dropped.unbind(2)[:64], *dropped.unbind(3)[:64]):
        holds(part, p)
    for axis in range(4):
        holds(
            dropped.narrow(axis, 0, dropped.shape[axis] - 1)
            & dropped.narrow(axis, 1, dropped.shape[axis] - 1),
            p * p,
        )


def test_dropout_rate_0_and_1(device):
    case = make_case(device=device, p=1.0, seed=1)
    out, logsumexp = ours(case)
    assert (out == 0).all()
    assert logsumexp.isfinite().all()
    (gradient,) = torch.autograd.grad(out.sum(), case.value)
    assert (gradient == 0).all()
    without = make_case(device=device)
    same = lowtide.memory_efficient_attention(
        without.query, without.key, without.value, p=0.0, seed=3, backend="torch"
    )
    assert torch.equal(same, ours(without, backend="torch")[0])


@pytest.mark.parametrize("mask", [None, masks.LowerTriangularMask()])
def test_dropout_independent_of_tiles(device, monkeypatch, mask):
    case = make_case(2, 70, 90, 4, 2, mask=mask, bias=(0, 1, 0, 1), p=0.3, seed=11, device=device)
    upstream = make_upstream(case)
    whole = differentiate(ours, case, upstream)
    monkeypatch.setattr(tiling, "TILE", 300)
    monkeypatch.setattr(tiling, "SIDE", 16)
    small = differentiate(ours, case, upstream)
    for name, part in whole.items():
        torch.testing.assert_close(small[name], part)
        assert not torch.equal(part, torch.zeros_like(part))


def test_dropout_seeds_and_generators(device):
    case = make_case(device=device)
    tensors = (case.query, case.key, case.value)

    def call(**options):
        return lowtide.memory_efficient_attention(*tensors, p=0.5, **options)

    assert torch.equal(call(seed=4), call(seed=torch.tensor(4, device=device)))
    assert not torch.equal(call(seed=4), call(seed=5))
    generators = [torch.Generator(device).manual_seed(9) for _ in range(2)]
    assert torch.equal(*(call(generator=generator) for generator in generators))
    assert not torch.equal(call(generator=generators[0]), call())
    torch.manual_seed(3)
    first = call()
    assert not torch.equal(first, call())
    torch.manual_seed(3)
    assert torch.equal(first, call())
