"""Calls that torch's CUDA kernels could misread: whoever computes them, they are right. (cuDNN's
kernel reads garbage from memory that is not aligned to 16 bytes, without an error; the others
fault.)"""

from functools import partial

import pytest
import torch

import lowtide
from lowtide import attn_bias as masks
from lowtide.ops.attention.backend import reason_against_sdpa
from lowtide.ops.attention.definition.operands import AttentionCall, AttentionOptions, Operands
from tests.ops.attention.helpers import Case, check, differentiate, make_case, make_upstream, ours
from tests.support.budgets import HALVES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CAUSAL = masks.LowerTriangularMask()


def within(x, widths, offset):
    """A view of memory full of nan, wider by `widths`, that begins `offset` features into it."""
    sizes = [size + more for size, more in zip(x.shape, widths)]
    memory = torch.full(sizes, torch.nan, dtype=x.dtype, device=x.device)
    view = memory[tuple(slice(0, size) for size in x.shape[:-1])][..., offset : offset + x.shape[-1]]
    return view.copy_(x)


def flat(x, offset):
    """Contiguous, from `offset` on."""
    memory = torch.full((x.numel() + offset,), torch.nan, dtype=x.dtype, device=x.device)
    return memory[offset:].view(x.shape).copy_(x)


def packed(x, offset):
    """The middle third of each row [3 H K] of one tensor, as queries, keys and values often lie."""
    B, M, H, K = x.shape
    memory = torch.full((B * M * 3 * H * K + offset,), torch.nan, dtype=x.dtype, device=x.device)
    return memory[offset:].view(B, M, 3, H, K)[:, :, 1].copy_(x)


LAYOUTS = {
    "plain": lambda x: x,
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "rows first": lambda x: x.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3),
    "features first": lambda x: x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0),
    "odd rows": lambda x: within(x, (0, 0, 0, 1), 0),
    "more heads": lambda x: within(x, (1, 3, 1, 0), 0),
    "heads expanded": lambda x: x[:, :, :1].expand_as(x),
    "batches expanded": lambda x: x[:1].expand_as(x),
    "rows expanded": lambda x: x[:, :1].expand_as(x),
    "rows that overlap": lambda x: x.flatten().as_strided(x.shape, (x.stride(0), 8, x.stride(2), 1)),
    "from elsewhere": lambda x: torch.from_dlpack(flat(x, 1)),
    **{f"wider, {offset}": partial(within, widths=(0, 0, 0, 8), offset=offset) for offset in (0, 1, 2, 4, 8)},
    **{f"flat, {offset}": partial(flat, offset=offset) for offset in (1, 3, 8)},
    **{f"packed, {offset}": partial(packed, offset=offset) for offset in (0, 5)},
}
ALIGNED = {"plain", "heads first", "rows first", "more heads", "wider, 0", "wider, 8", "flat, 8", "packed, 0"}


def of_xformers(case):
    return lowtide.memory_efficient_attention(case.query, case.key, case.value, case.mask)


def of_torch(case):
    query, key, value = (each.transpose(1, 2) for each in (case.query, case.key, case.value))
    out = lowtide.scaled_dot_product_attention(
        query, key, value, is_causal=case.mask is not None, enable_gqa=True
    )
    return out.transpose(1, 2)


SIGNATURES = [of_xformers, of_torch]


def with_logsumexp(function):
    return lambda case: (function(case), ours(case)[1])


def compiled(function, backend):
    """Of the tensors, which are what a graph is given."""
    torch._dynamo.reset()

    def of_tensors(mask, *tensors):
        return function(Case(*tensors, None, mask))

    graph = torch.compile(of_tensors, fullgraph=True, backend=backend)
    return lambda case: graph(case.mask, case.query, case.key, case.value)


def sample(mask=None, dtype=torch.bfloat16, **sizes):
    given = {"B": 2, "M": 128, "N": 128, "H": 4, "G": 2, "K": 64} | sizes
    return make_case(**given, mask=mask, dtype=dtype, device="cuda")


def laid(case, layout, places=(0, 1, 2)):
    leaves = [leaf.detach() for leaf in case.leaves().values()]
    leaves = [LAYOUTS[layout](leaf) if at in places else leaf for at, leaf in enumerate(leaves)]
    return Case(*(leaf.requires_grad_() for leaf in leaves), None, case.mask)


def run(function, case, upstream=None):
    upstream = make_upstream(case)[0] if upstream is None else upstream
    check(differentiate(with_logsumexp(function), case, (upstream, None)), case, (upstream, None))


@pytest.mark.parametrize("mask", [None, CAUSAL])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("function", SIGNATURES)
@pytest.mark.parametrize("dtype", HALVES)
def test_operands(function, layout, mask, dtype):
    case = laid(sample(mask, dtype), layout)
    run(function, case)
    operands = Operands(*(each.transpose(1, 2) for each in (case.query, case.key, case.value)))
    refused = reason_against_sdpa(AttentionCall(operands, mask, None, AttentionOptions(0.125)))
    assert (refused is None) == (layout in ALIGNED), refused


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("layout", ["wider, 1", "flat, 3", "packed, 5", "heads expanded"])
def test_one_operand(layout, place):
    run(of_xformers, laid(sample(CAUSAL), layout, (place,)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("function", SIGNATURES)
@pytest.mark.parametrize("backend", [None, "inductor"])
def test_upstream_gradients(function, layout, backend):
    case = sample(CAUSAL)
    upstream = LAYOUTS[layout](make_upstream(case)[0].bfloat16())
    run(function if backend is None else compiled(function, backend), case, upstream)


@pytest.mark.parametrize("function", SIGNATURES)
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_plans_of_torch_for_other_strides(function, backend):
    """Torch finds a plan by the strides of queries, keys and values alone."""
    case = sample(CAUSAL, M=136, N=136)
    tensors = [leaf.transpose(1, 2) for leaf in case.leaves().values()]
    out = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)
    torch.autograd.grad(out, tensors, torch.randn_like(out).contiguous())
    run(function if backend is None else compiled(function, backend), case)


@pytest.mark.parametrize("backend", [None, "inductor"])
def test_upstream_expanded_from_sum(backend):
    """One number, expanded."""
    case = sample()
    upstream = torch.ones((), device="cuda", dtype=torch.bfloat16).expand(2, 128, 4, 64)
    run(of_xformers if backend is None else compiled(of_xformers, backend), case, upstream)


@pytest.mark.parametrize("backend", ["inductor", "aot_eager", "eager"])
@pytest.mark.parametrize("function", SIGNATURES)
@pytest.mark.parametrize("first", ["wider, 0", "wider, 1"])
def test_cuda_graph_other_addresses(function, first, backend):
    """No guard asks for them: the graph is that of the first call."""
    graph = compiled(function, backend)
    for layout in (first, "wider, 0", "wider, 1", "wider, 4", "wider, 8"):
        run(graph, laid(sample(CAUSAL), layout))


@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_compile_operands(layout, backend):
    run(compiled(of_xformers, backend), laid(sample(), layout))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("offset", [1, 4, 8])
def test_compile_slice(offset, dynamic):
    torch._dynamo.reset()

    def function(packed, mask):
        query, key, value = (part[..., offset : offset + 64] for part in (2 * packed).unbind(2))
        return lowtide.memory_efficient_attention(query, key, value, mask)

    graph = torch.compile(function, fullgraph=True, dynamic=dynamic)
    for M in (128, 256):
        memory = torch.randn(2, M, 3, 4, 72, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        parts = [part.detach()[..., offset : offset + 64] for part in (2 * memory).unbind(2)]
        case = Case(*(part.requires_grad_() for part in parts), None, CAUSAL)
        upstream = make_upstream(case)[0].bfloat16()
        out = graph(memory, CAUSAL)
        (whole,) = torch.autograd.grad(out, memory, upstream)
        gradients = [each[..., offset : offset + 64] / 2 for each in whole.unbind(2)]
        found = {"out": out.detach(), "logsumexp": ours(case)[1].detach()}
        check({**found, **dict(zip(case.leaves(), gradients))}, case, (upstream, None))


SIZES = {
    "one query": {"M": 1},
    "one key": {"N": 1},
    "one query and key": {"M": 1, "N": 1},
    "one head": {"H": 1, "G": 1},
    "one batch": {"B": 1},
    "8 features": {"K": 8},
    "256 features": {"K": 256},
    "72 features": {"K": 72},
    "192 and 128 features": {"K": 192, "E": 128},
    "one key head": {"H": 6, "G": 1},
    "more heads than a grid": {"B": 16400, "M": 8, "N": 8, "K": 8},
}


@pytest.mark.parametrize("layout", ["plain", "heads first", "wider, 1"])
@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("name", SIZES)
def test_sizes(name, backend, layout):
    case = laid(sample(**SIZES[name]), layout)
    run(of_xformers if backend is None else compiled(of_xformers, backend), case)


@pytest.mark.parametrize("scale", [-1.0, 0.0, 1e-300, 3.0])
@pytest.mark.parametrize("mask", [None, CAUSAL])
def test_scales(scale, mask):
    case = sample(mask, scale=scale)
    upstream = (make_upstream(case)[0], None)

    def function(case):
        tensors = (case.query, case.key, case.value)
        return lowtide.memory_efficient_attention(*tensors, mask, scale=scale), ours(case)[1]

    check(differentiate(function, case, upstream), case, upstream)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory < 40 << 30,
    reason="needs 40 GiB",
)
def test_more_elements_than_int32():
    """The last batch, whose place 32 bits cannot say."""
    tensors = [
        torch.empty(513, 1024, 64, 64, device="cuda", dtype=torch.bfloat16).normal_() for _ in range(3)
    ]
    found = lowtide.memory_efficient_attention(*tensors)[-1].double()
    query, key, value = (tensor[-1].double() for tensor in tensors)
    del tensors
    scores = torch.einsum("mhk,nhk->hmn", query, key) / 8
    expected = torch.einsum("hmn,nhk->mhk", scores.softmax(-1), value)
    assert torch.linalg.vector_norm(found - expected) <= 4e-3 * torch.linalg.vector_norm(expected)


@pytest.mark.parametrize("backend", [None, "inductor"])
@pytest.mark.parametrize("K", [64, 256])
def test_same_bits_deterministic(backend, K):
    case = sample(CAUSAL, B=4, M=1024, N=1024, K=K)
    function = of_xformers if backend is None else compiled(of_xformers, backend)
    upstream = make_upstream(case)[0].bfloat16()
    torch.use_deterministic_algorithms(True)
    try:
        first, *others = (
            torch.autograd.grad(function(case), list(case.leaves().values()), upstream) for _ in range(4)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    for other in others:
        assert all(torch.equal(got, want) for got, want in zip(other, first))
