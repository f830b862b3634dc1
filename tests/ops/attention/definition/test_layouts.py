"""The layouts of xformers and of torch, any strides, and poison around every view."""

import pytest
import torch
import torch.nn.functional as F

import lowtide
from lowtide import attn_bias as masks
from tests.ops.attention.helpers import check, differentiate, laid_out, make_case, ours


@pytest.mark.parametrize("how", ["every other", "unaligned", "reversed dimensions", "expanded"])
@pytest.mark.parametrize("options", [{}, {"p": 0.2, "seed": 1}, {"softcap": 3.0}], ids=str)
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_strides(device, backend, options, how):
    mask = masks.LowerTriangularMask()
    case = make_case(2, 33, 45, 4, 2, mask=mask, bias=(1, 1, 1, 1), device=device, **options)
    case, upstream = laid_out(case, how)
    check(differentiate(ours, case, upstream, backend=backend), case, upstream)
    plain = lowtide.memory_efficient_attention(case.query, case.key, case.value, backend=backend)
    contiguous = (each.detach().contiguous() for each in (case.query, case.key, case.value))
    torch.testing.assert_close(plain, lowtide.memory_efficient_attention(*contiguous, backend=backend))


@pytest.mark.parametrize("bias", [None, (1, 1, 1), (0, 1, 1), (0, 0, 1)])
def test_three_dimensions(device, bias):
    B, M, N, K = 3, 17, 23, 8
    query, key, value = (torch.randn(B, length, K, device=device, requires_grad=True) for length in (M, N, N))
    tensor = None
    if bias is not None:
        sizes = [size if full else 1 for size, full in zip((B, M, N), bias)]
        tensor = torch.randn(sizes, device=device, requires_grad=True)
    leaves = [each for each in (query, key, value, tensor) if each is not None]
    out, logsumexp = lowtide.memory_efficient_attention_with_lse(query, key, value, tensor)
    assert (out.shape, logsumexp.shape) == ((B, M, K), (B, M))
    four, own = (
        (each[:, :, None] for each in (query, key, value)),
        None if tensor is None else tensor[:, None],
    )
    wide, wide_logsumexp = lowtide.memory_efficient_attention_with_lse(*four, own)
    assert torch.equal(out, wide[:, :, 0])
    assert torch.equal(logsumexp, wide_logsumexp[:, 0])
    for got, like in zip(torch.autograd.grad(out.square().sum(), leaves), leaves):
        assert got.shape == like.shape


@pytest.mark.parametrize("heads", ["1", "expanded", "own"])
@pytest.mark.parametrize("gradients", [False, True])
def test_five_dimensions(device, heads, gradients):
    B, M, N, G, H, K = 2, 17, 23, 2, 3, 8
    query = torch.randn(B, M, G, H, K, device=device, requires_grad=True)
    key, value = (
        torch.randn(B, N, G, H if heads == "own" else 1, K, device=device, requires_grad=gradients)
        for _ in range(2)
    )
    used = [each.expand(B, N, G, H, K) if heads == "expanded" else each for each in (key, value)]
    bias = torch.randn(B, G, H, 1, N, device=device, requires_grad=True)
    out, logsumexp = lowtide.memory_efficient_attention_with_lse(query, *used, bias)
    assert (out.shape, logsumexp.shape) == ((B, M, G, H, K), (B, G, H, M))
    full = [each.expand(B, N, G, H, K).flatten(2, 3) for each in (key, value)]
    expected, expected_logsumexp = lowtide.memory_efficient_attention_with_lse(
        query.flatten(2, 3), *full, bias.flatten(1, 2)
    )
    torch.testing.assert_close(out.flatten(2, 3), expected)
    torch.testing.assert_close(logsumexp.flatten(1, 2), expected_logsumexp)
    leaves = [each for each in (query, key, value, bias) if each.requires_grad]
    upstream = torch.randn_like(out)
    found = torch.autograd.grad(out, leaves, upstream)
    for got, want in zip(found, torch.autograd.grad(expected, leaves, upstream.flatten(2, 3))):
        torch.testing.assert_close(got, want)


SDPA = {
    "four dimensions": ([(2, 4, 9, 8)] + [(2, 4, 11, 8)] * 2, {}),
    "three dimensions": ([(4, 9, 8)] + [(4, 11, 8)] * 2, {"is_causal": True}),
    "two dimensions": ([(9, 8)] + [(11, 8)] * 2, {}),
    "five dimensions": ([(3, 2, 4, 9, 8)] + [(3, 2, 4, 11, 8)] * 2, {"is_causal": True}),
    "batches that broadcast": ([(2, 1, 4, 9, 8)] + [(1, 3, 4, 11, 8)] * 2, {}),
    "fewer dimensions": ([(2, 4, 9, 8)] + [(4, 11, 8)] * 2, {}),
    "one key head": ([(2, 4, 9, 8)] + [(2, 1, 11, 8)] * 2, {}),
    "groups": ([(2, 4, 9, 8)] + [(2, 2, 11, 8)] * 2, {"enable_gqa": True, "scale": 0.3}),
    "values of other features": ([(2, 4, 9, 8), (2, 4, 11, 8), (2, 4, 11, 5)], {}),
    "mask": ([(2, 4, 9, 8)] + [(2, 4, 11, 8)] * 2, {"mask": (4, 9, 11)}),
    "mask of keys": ([(2, 4, 9, 8)] + [(2, 4, 11, 8)] * 2, {"mask": (2, 1, 1, 11)}),
    "mask of five dimensions": ([(3, 2, 4, 9, 8)] + [(3, 2, 4, 11, 8)] * 2, {"mask": (3, 2, 1, 9, 11)}),
    "mask of two dimensions": ([(4, 9, 8)] + [(4, 11, 8)] * 2, {"mask": (9, 11)}),
}


@pytest.mark.parametrize("kind", [torch.bool, torch.float64])
@pytest.mark.parametrize("name", SDPA)
def test_sdpa_called(device, name, kind):
    shapes, options = SDPA[name]
    options = dict(options)
    leaves = [torch.randn(s, dtype=torch.float64, device=device, requires_grad=True) for s in shapes]
    if (shape := options.pop("mask", None)) is not None:
        mask = torch.randn(shape, dtype=torch.float64, device=device)
        mask = mask > -0.5 if kind == torch.bool else mask.requires_grad_()
        options["attn_mask"] = mask
    outs = [
        f(*leaves, **options) for f in (lowtide.scaled_dot_product_attention, F.scaled_dot_product_attention)
    ]
    torch.testing.assert_close(*outs)
    leaves += [each for each in options.values() if isinstance(each, torch.Tensor) and each.requires_grad]
    upstream = torch.randn_like(outs[0])
    for got, want in zip(*(torch.autograd.grad(out, leaves, upstream) for out in outs)):
        torch.testing.assert_close(got, want)


def test_replaces_torch_sdpa(device, monkeypatch):
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, device=device)
    x = torch.randn(2, 7, 16, device=device)
    expected = layer(x)
    monkeypatch.setattr(F, "scaled_dot_product_attention", lowtide.scaled_dot_product_attention)
    torch.testing.assert_close(layer(x), expected)


def test_result_strides(device):
    """[B, M, H, E], so that .flatten(2) is a view; [B, H, M, E] for torch's signature."""
    case = make_case(p=0.1, seed=0, device=device)
    assert ours(case)[0].is_contiguous()
    query, key, value = (each.transpose(1, 2) for each in (case.query, case.key, case.value))
    assert lowtide.scaled_dot_product_attention(query, key, value, dropout_p=0.1).is_contiguous()
