"""Calls that are handed to torch's own kernels give what ours give, in any state and layout.

Reasons against them are in test_refusals.py, their CUDA kernels in test_delegated_cuda.py.
"""

import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide import attn_bias as masks
from lowtide.ops.attention.definition.operands import AttentionOptions, Operands
from tests.ops.attention.helpers import check, differentiate, make_case, make_upstream, ours
from tests.support.budgets import HALVES, norm

CAUSAL = masks.LowerTriangularMask()
OPS = torch.ops.lowtide


def plain(case, **options):
    """A call that asks for no logsumexp, since torch's kernels give none."""
    out = lowtide.memory_efficient_attention(
        case.query, case.key, case.value, case.mask, scale=case.options.get("scale"), **options
    )
    return out, ours(case, backend="torch")[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("scale", [-1.0, 0.0, -1e-300, 1e-300, 1e-40, 1e-3, 3.0])
@pytest.mark.parametrize("mask", [None, CAUSAL])
def test_any_scale(device, mask, scale, dtype):
    """torch masks by -inf, which is nan times a scale of 0 or less; float32 rounds 1e-300 to 0."""
    case = make_case(2, 70, 70, 2, mask=mask, scale=scale, dtype=dtype, device=device)
    upstream = (make_upstream(case)[0], None)
    check(differentiate(plain, case, upstream), case, upstream)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("M", "N"), [(8192, 16), (16, 4096), (256, 256)])
def test_cpu_half_precision_sums_in_float32(M, N, dtype):
    """Torch's kernels there add up gradients in it: over 8192 queries the error is four-fold."""
    case = make_case(1, M, N, 1, K=32, dtype=dtype)
    leaves = case.leaves()
    upstream = torch.ones(1, M, 1, 32, dtype=dtype)

    def gradients(case, backend):
        out = lowtide.memory_efficient_attention(case.query, case.key, case.value, backend=backend)
        return out, *torch.autograd.grad(out, list(case.leaves().values()), upstream.to(out.dtype))

    exact = gradients(case.to(torch.float64), "reference")
    best = gradients(case, "reference")
    for name, got, once, want in zip(("out", *leaves), gradients(case, "auto"), best, exact):
        errors = [norm(each.double() - want) for each in (got, once)]
        assert errors[0] <= 2 * errors[1], name


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_same_bits_no_grad(dtype):
    """Else a checkpoint would compute a result other than the one that is differentiated."""
    case = make_case(1, 130, 130, 2, K=32, dtype=dtype)
    with torch.no_grad():
        without = lowtide.memory_efficient_attention(case.query, case.key, case.value, CAUSAL)
    assert torch.equal(lowtide.memory_efficient_attention(case.query, case.key, case.value, CAUSAL), without)


LAYOUTS = {
    "keys expanded over rows": lambda x: x[:, :1].expand_as(x),
    "heads expanded": lambda x: x[:, :, :1].expand_as(x),
    "batches expanded": lambda x: x[:1].expand_as(x),
    "rows that overlap": lambda x: x.flatten().as_strided(x.shape, (x.stride(0), 3, x.stride(2), 1)),
    "of a wider tensor": lambda x: torch.cat([x, x, x], -1)[..., 3 : 3 + x.shape[-1]],
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "every other feature": lambda x: torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of", ["operands", "upstream"])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("mask", [None, CAUSAL])
def test_layouts(device, mask, name, of, dtype):
    case = make_case(2, 40, 40, 4, K=16, mask=mask, dtype=dtype, device=device)
    upstream = make_upstream(case)[0].to(dtype)
    if of == "operands":
        leaves = (LAYOUTS[name](leaf.detach()).requires_grad_() for leaf in case.leaves().values())
        case = type(case)(*leaves, None, mask)
    else:
        upstream = LAYOUTS[name](upstream)
    check(differentiate(plain, case, (upstream, None)), case, (upstream, None))


def test_saved_tensors_restrided(device):
    case = make_case(2, 40, 40, 4, K=16, mask=CAUSAL, device=device)
    upstream = (make_upstream(case)[0], None)
    expected = differentiate(plain, case, upstream)

    def turned(tensor):
        return tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor

    with torch.autograd.graph.saved_tensors_hooks(turned, lambda tensor: tensor):
        found = differentiate(plain, case, upstream)
    for part, want in expected.items():
        assert torch.equal(found[part], want), part


@pytest.mark.parametrize("rows_first", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_compile_operator(dtype, causal, rows_first):
    """The operator gives what the tiles give, in the same layout, and reads their statistics."""
    case = make_case(2, 33, 33, 4, 2, 16, dtype=dtype)
    operands = Operands(*(leaf.detach().transpose(1, 2) for leaf in case.leaves().values()))
    own = AttentionOptions(0.3, rows_first=rows_first, backend="sdpa", causal=causal)
    intervals = {}
    if causal:
        intervals = {"first": torch.zeros(33).int(), "end": torch.arange(1, 34).int()}
    found, expected = (
        OPS.attention(*given, True, *options)
        for given, options in (
            (operands, own),
            (operands._replace(**intervals), own._replace(backend="torch")),
        )
    )
    torch.testing.assert_close(
        *([out, statistics.sum(2)] for out, statistics in (found, expected))
    )  # one of the two kernels has the whole logsumexp in its first number
    assert [each.stride() for each in found] == [each.stride() for each in expected]
    wanted = (True, False, True, False)
    upstream = torch.randn_like(found[0])
    arguments = (upstream, None, *expected, None, *operands, wanted, *own)
    torch.testing.assert_close(
        OPS.attention_backward(*arguments),
        OPS.attention_backward(
            *(upstream, None, *found, None),
            *(*operands._replace(**intervals), wanted, *own._replace(backend="torch")),
        ),
    )


@pytest.mark.parametrize("rows_first", [False, True])
def test_compile_operator_opcheck(rows_first):
    operands = Operands(*(torch.randn(2, 4, 9, 8).transpose(1, 2) for _ in range(3)))
    options = AttentionOptions(0.3, rows_first=rows_first, backend="sdpa", causal=True)
    torch.library.opcheck(OPS.attention.default, (*operands, False, *options))
    out, statistics = OPS.attention(*operands, True, *options)
    upstream = torch.randn_like(out)
    given = (upstream, None, out, statistics, None, *operands, (True, False, True, False), *options)
    torch.library.opcheck(OPS.attention_backward.default, given)


def test_no_hook_left_after_second_derivative():
    """A graph that was kept gives plain gradients again, of its own kernel."""
    leaves = [torch.randn(2, 4, 16, 8, requires_grad=True) for _ in range(3)]
    out = lowtide.scaled_dot_product_attention(*leaves)
    upstream = torch.randn_like(out)
    plain = torch.autograd.grad(out, leaves, upstream, retain_graph=True)
    graph = torch.autograd.grad(out, leaves, upstream, create_graph=True)
    again = torch.autograd.grad(out, leaves, upstream, retain_graph=True)
    for first, differentiable, second in zip(plain, graph, again):
        assert torch.equal(first, second)
        assert differentiable.requires_grad
        torch.testing.assert_close(first, differentiable)


def test_checkpoint_frees_tensors():
    """Nothing of a checkpointed call is held between forward and backward."""
    memory = []

    def function(x):
        query = x * 2
        out = lowtide.scaled_dot_product_attention(query, query, query)
        memory.extend(weakref.ref(each.untyped_storage()) for each in (query, out))
        return out + 1

    x = torch.randn(1, 4, 64, 8, requires_grad=True)
    out = checkpoint(function, x, use_reentrant=False)
    assert [each() for each in memory] == [None, None]
    (found,) = torch.autograd.grad(out.square().sum(), x)
    (expected,) = torch.autograd.grad(function(x).square().sum(), x)
    torch.testing.assert_close(found, expected)
