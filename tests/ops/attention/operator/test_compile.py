"""The operators as torch sees them: opcheck, FLOPs, one graph."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.flop_counter import FlopCounterMode

import lowtide
from lowtide import attn_bias as masks
from lowtide.ops.attention.definition.operands import AttentionOptions, Operands
from tests.ops.attention.helpers import make_case, ours
from tests.support.extended import all_extended_but
from tests.support.graphs import needs_tracing

pytestmark = needs_tracing

OPS = torch.ops.lowtide
WANTED = [(True,) * 4, (True, False, False, False), (False, True, True, False), (False, False, False, True)]


def operands(device, dtype=torch.float32):
    case = make_case(2, 9, 11, 4, 2, 8, 5, bias=(0, 1, 0, 1), dtype=dtype, device=device)
    tensors = (each.detach().transpose(1, 2) for each in (case.query, case.key, case.value))
    first = torch.zeros(9, dtype=torch.int32, device=device)
    end = torch.arange(3, 12, dtype=torch.int32, device=device)
    return Operands(*tensors, case.bias.detach(), first, end, torch.tensor(3, device=device))


@pytest.mark.extended
@pytest.mark.parametrize("rows_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(device, dtype, rows_first):
    given = operands(device, dtype)
    options = AttentionOptions(0.4, 3.0, 0.2, rows_first, "torch")
    for keep in (False, True):
        torch.library.opcheck(OPS.attention.default, (*given, keep, *options))
    out, statistics = OPS.attention(*given, True, *options)
    for wanted in WANTED:
        for of_logsumexp in (None, torch.randn_like(statistics[:, :, 0])):
            arguments = (torch.randn_like(out), of_logsumexp, out, statistics, None, *given, wanted, *options)
            torch.library.opcheck(OPS.attention_backward.default, arguments)


def test_flops(device):
    """In products of M N K: two forward, five backward, fewer where less is wanted."""
    B, M, N, H, K = 2, 9, 11, 4, 8

    def products(trained):
        case = make_case(B, M, N, H, K=K, bias=(0, 1, 0, 1), device=device)
        for name, leaf in case.leaves().items():
            leaf.requires_grad_(name in trained)
        with FlopCounterMode(display=False) as counter:
            out, _ = ours(case, backend="torch")
            if trained:
                out.sum().backward()
        return counter.get_total_flops() / (2 * B * H * M * N * K)

    assert products(()) == 2
    assert products(("query", "key", "value", "bias")) == 2 + 5
    assert products(("value",)) == 2 + 2
    assert products(("bias",)) == 2 + 2


CALLS = {
    "plain": {},
    "causal": {"attn_bias": masks.LowerTriangularMask()},
    "all": {"window": (5, 1), "softcap": 3.0, "p": 0.3, "seed": 4, "scale": 0.4},
    "local": {"attn_bias": masks.LocalAttentionFromBottomRightMask(3, 2)},
}


@pytest.mark.parametrize("name", all_extended_but(["causal", "local"], CALLS))
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_one_graph(device, name, dynamic):
    torch._dynamo.reset()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def function(*tensors):
        return lowtide.memory_efficient_attention(*tensors, **CALLS[name]).square().sum()

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for length in (12, 17):
        tensors = [torch.randn(2, length, 2, 8, dtype=dtype, device=device) for _ in range(3)]
        tensors = [tensor.requires_grad_() for tensor in tensors]
        found, expected = compiled(*tensors), function(*tensors)
        torch.testing.assert_close(found, expected)
        for got, want in zip(*(torch.autograd.grad(loss, tensors) for loss in (found, expected))):
            torch.testing.assert_close(got, want)


def causal(query, key, value):
    return lowtide.memory_efficient_attention(query, key, value, masks.LowerTriangularMask(), backend="torch")


@pytest.mark.parametrize(
    "function", [lowtide.memory_efficient_attention, lowtide.scaled_dot_product_attention, causal]
)
def test_compiled_once_beside_eager_calls(device, function):
    """Eager calls of other sizes, which are remembered, compile nothing again."""
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(function, backend=counter, fullgraph=True)
    given = torch.randn(3, 1, 16, 2, 8, device=device)
    expected = function(*given)
    for size in range(5, 15):
        torch.testing.assert_close(compiled(*given), expected)
        function(*torch.randn(3, 1, size, 2, 8, device=device))
    assert counter.frame_count == 1


@pytest.mark.extended
def test_compile_bias_and_logsumexp(device):
    """Of one more backend, which generates code."""
    torch._dynamo.reset()

    def function(query, key, value, bias):
        out, logsumexp = lowtide.memory_efficient_attention_with_lse(
            query, key, value, masks.LowerTriangularMaskWithTensorBias(bias)
        )
        return out.square().sum() + logsumexp.sum()

    tensors = [torch.randn(2, 12, 2, 8, device=device, requires_grad=True) for _ in range(3)]
    tensors.append(torch.randn(1, 2, 1, 12, device=device, requires_grad=True))
    compiled = torch.compile(function, fullgraph=True)
    found, expected = compiled(*tensors), function(*tensors)
    torch.testing.assert_close(found, expected)
    for got, want in zip(*(torch.autograd.grad(loss, tensors) for loss in (found, expected))):
        torch.testing.assert_close(got, want)


def test_compile_several_sequences():
    torch._dynamo.reset()
    mask = masks.BlockDiagonalCausalMask.from_seqlens([5, 1, 6])

    def function(x):
        return lowtide.memory_efficient_attention(x, x, x, mask).square().sum()

    x = torch.randn(1, 12, 2, 8, requires_grad=True)
    found, expected = torch.compile(function, fullgraph=True, backend="aot_eager")(x), function(x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(loss, x)[0] for loss in (found, expected)))


@pytest.mark.parametrize("with_bias", [False, True])
def test_compile_makes_masks(with_bias):
    torch._dynamo.reset()

    def function(x, bias):
        mask = masks.BlockDiagonalMask.from_seqlens([5, 1, 6])
        mask = mask.add_bias(bias).make_causal() if with_bias else mask.make_causal()
        return lowtide.memory_efficient_attention(x, x, x, mask)

    tensors = torch.randn(1, 12, 2, 8), torch.randn(1, 2, 1, 12)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*tensors), function(*tensors))


def test_compile_refuses_forward_mode():
    torch._dynamo.reset()
    x = torch.randn(1, 4, 1, 3)

    def function(x, tangent):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, tangent)
            return lowtide.memory_efficient_attention(dual, x, x, backend="torch")

    with pytest.raises(Exception, match=r"forward mode inside torch.compile|forward_ad"):
        torch.compile(function, fullgraph=True, backend="eager")(x, x)


@pytest.mark.parametrize(
    "shape",
    [
        (1, 2, 1, None),
        *(pytest.param(each, marks=pytest.mark.extended) for each in ((2, 1, None, None), (1, 1, None, 1))),
    ],
)
def test_compile_bias_of_symbolic_size(device, shape):
    """Dynamo makes a size a symbol once it has seen two; checks must not take it for another."""
    torch._dynamo.reset()
    compiled = torch.compile(lowtide.memory_efficient_attention, fullgraph=True, backend="aot_eager")
    tensors = [torch.randn(2, 12, 2, 8, device=device) for _ in range(3)]
    torch.testing.assert_close(compiled(*tensors), lowtide.memory_efficient_attention(*tensors))
    tensors = [torch.randn(2, 17, 2, 8, device=device) for _ in range(3)]
    tensors.append(torch.randn([size or 17 for size in shape], device=device))
    torch.testing.assert_close(compiled(*tensors), lowtide.memory_efficient_attention(*tensors))


def test_sizes_of_short_problems_are_no_guards():
    """They decide what backward needs in half precision, and which backend CUDA takes."""
    pytest.importorskip("triton")

    class Causal(torch.nn.Module):
        def forward(self, *tensors):
            return lowtide.memory_efficient_attention(*tensors, masks.LowerTriangularMask())

    class Local(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))

        def forward(self, query, *others):
            given = query * self.scale, *others
            return lowtide.memory_efficient_attention(*given, window=(3, 0), backend="triton")

    length = torch.export.Dim("length", min=2, max=4096)
    sizes = ({1: length},) * 3
    tensors = torch.randn(3, 70, 80, 4, 8, dtype=torch.bfloat16)
    torch.export.export(Local(), (*tensors,), dynamic_shapes=(sizes[0], sizes[1:]), strict=False)
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
        fakes = [torch.empty(300, 48, 32, 32, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    torch.export.export(Causal(), tuple(fakes), dynamic_shapes=(sizes,), strict=False)
