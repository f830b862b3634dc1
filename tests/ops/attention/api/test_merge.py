"""Attention to parts of the keys, put together."""

import pytest
import torch

import lowtide
from lowtide import attn_bias as masks
from tests.ops.attention.helpers import make_case


def check_merged(parts, whole, leaves):
    """The parts merged are the whole, and so are their gradients."""
    merged = lowtide.merge_attentions(parts)
    upstream = [torch.randn_like(each) for each in whole]
    for got, want in zip(merged, whole):
        torch.testing.assert_close(got, want)
    found, expected = (torch.autograd.grad(outs, leaves, upstream) for outs in (merged, whole))
    for got, want in zip(found, expected):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("layout", ["BMHK", "BMK", "BMGHK"])
@pytest.mark.parametrize("splits", [[53], [20, 33], [1, 0, 52]])
def test_merged_parts_match_whole(device, layout, splits):
    case = make_case(device=device, dtype=torch.float64)
    leaves = [case.query, case.key, case.value]
    query, key, value = leaves
    if layout == "BMK":
        query, key, value = (each[:, :, 0] for each in leaves)
    elif layout == "BMGHK":
        query, key, value = (each.unflatten(2, (2, 2)) for each in leaves)
    whole = lowtide.memory_efficient_attention_with_lse(query, key, value)
    parts = [
        lowtide.memory_efficient_attention_with_lse(query, k, v)
        for k, v in zip(key.split(splits, 1), value.split(splits, 1))
    ]
    check_merged(parts, whole, leaves)


def test_merge_part_without_keys(device):
    """A causal ring: the first queries see nothing of the later keys."""
    case = make_case(1, 8, 8, dtype=torch.float64, device=device)
    query, key, value = leaves = [case.query, case.key, case.value]
    whole = lowtide.memory_efficient_attention_with_lse(query, key, value, masks.LowerTriangularMask())
    late = masks.LowerTriangularFromBottomRightMask()  # with keys 4 to 7, query i sees keys 4 .. i
    parts = [
        lowtide.memory_efficient_attention_with_lse(query, key[:, :4], value[:, :4], window=(-1, 4)),
        lowtide.memory_efficient_attention_with_lse(query, key[:, 4:], value[:, 4:], late),
    ]
    assert (parts[1][1][:, :, :4] == -torch.inf).all()
    check_merged(parts, whole, leaves)


def test_merge_all_parts_without_keys(device):
    out = torch.randn(1, 3, 2, 4, device=device, requires_grad=True)
    logsumexp = torch.full((1, 2, 3), -torch.inf, device=device, requires_grad=True)
    merged, total = lowtide.merge_attentions([(out, logsumexp)] * 2)
    assert (merged == 0).all()
    assert (total == -torch.inf).all()
    for gradient in torch.autograd.grad(merged.sum(), [out, logsumexp]):
        assert (gradient == 0).all()


def test_merge_derivatives():
    def parts(*tensors):
        return lowtide.merge_attentions([tensors[:2], tensors[2:]])

    shapes = [(1, 2, 3, 2), (1, 3, 2)] * 2
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(parts, leaves, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(parts, leaves)


def test_merge_half_precision_dtype(device):
    case = make_case(dtype=torch.bfloat16, device=device)
    part = lowtide.memory_efficient_attention_with_lse(case.query, case.key, case.value)
    merged, logsumexp = lowtide.merge_attentions([part, part])
    assert (merged.dtype, logsumexp.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(merged, part[0])
    torch.testing.assert_close(logsumexp, part[1] + torch.log(torch.tensor(2.0)))


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ([], ValueError, "one \\(out, logsumexp\\) at least"),
        ([torch.zeros(2, 3, 4, 5)], TypeError, r"parts\[0\] must be"),
        ([(torch.zeros(2, 3, 4, 5), torch.zeros(2, 3, 4))], ValueError, r"parts\[0\] must be out"),
        ([(torch.zeros(2, 3, 4).long(), torch.zeros(2, 3))], TypeError, r"parts\[0\]\[0\] must be float32"),
        (
            [(torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.complex64))],
            TypeError,
            r"parts\[0\]\[1\] must be float32, .* got torch.complex64",
        ),
        (
            [(torch.zeros(2, 3, 4), torch.zeros(2, 3)), (torch.zeros(2, 3, 4), torch.zeros(2, 3).double())],
            ValueError,
            r"logsumexp of parts\[1\] must be like the first",
        ),
    ],
)
def test_merge_errors(parts, error, message):
    with pytest.raises(error, match=message):
        lowtide.merge_attentions(parts)
