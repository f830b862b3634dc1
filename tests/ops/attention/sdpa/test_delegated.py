"""What is handed to torch's own kernels, and what is not: only what they are known to compute
right. Their CUDA kernels themselves are in test_delegated_cuda.py.
"""

import sys
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide import attn_bias as masks
from lowtide.ops.attention import backend, remembered
from lowtide.ops.attention.backend import reason_against_sdpa
from lowtide.ops.attention.definition.operands import AttentionCall, AttentionOptions, Operands
from lowtide.ops.attention.sdpa import alignment
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


def reason(*shapes_and_strides, mask=None, scale=1.0, dtype=torch.bfloat16, device="cuda"):
    """The reason against torch's kernels, for tensors without data."""
    with FakeTensorMode():
        tensors = [
            torch.empty_strided(shape, strides, dtype=dtype, device=device)
            for shape, strides in shapes_and_strides
        ]
    operands = Operands(*(tensors if len(tensors) == 3 else tensors * 3))
    return reason_against_sdpa(AttentionCall(operands, mask, None, AttentionOptions(scale)))


REFUSED = {
    "an odd stride of rows": ([((2, 4, 64, 64), (4 * 64 * 65, 64 * 65, 65, 1))], "multiples of 8"),
    "an odd stride of heads": ([((2, 4, 64, 64), (4 * 4097, 4097, 64, 1))], "multiples of 8"),
    "features apart": ([((2, 4, 64, 64), (4 * 8192, 8192, 128, 2))], "side by side"),
    "expanded heads": ([((2, 4, 64, 64), (4096, 0, 64, 1))], "share memory"),
    "expanded batches": ([((2, 4, 64, 64), (0, 4096, 64, 1))], "share memory"),
    "expanded rows": ([((2, 4, 64, 64), (4096, 1024, 0, 1))], "share memory"),
    "rows that overlap": ([((2, 4, 64, 64), (4096, 1024, 8, 1))], "share memory"),
    "many numbers": ([((4, 64, 1 << 17, 64), (1 << 29, 1 << 23, 64, 1))], "2^31"),
    "far apart": ([((4, 4, 64, 64), (1 << 30, 4096, 64, 1))], "2^31"),
    "many heads": ([((1 << 14, 4, 64, 64), (4 * 4096, 4096, 64, 1))], "65535 heads"),
    "many features": ([((2, 4, 64, 264), (4 * 64 * 264, 64 * 264, 264, 1))], "at most 256"),
    "a multiple of 4 features": ([((2, 4, 64, 60), (4 * 4096, 4096, 64, 1))], "multiple of 8"),
}
FINE = ((2, 4, 64, 64), (4 * 4096, 4096, 64, 1))


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("name", REFUSED)
def test_sdpa_refused_operands(name, place):
    """One operand is refused, beside two that are not where sizes allow that."""
    (described,), message = REFUSED[name]
    given = [FINE] * 3 if described[0] == FINE[0] else [described] * 3
    given[place] = described
    assert message in str(reason(*given))


@pytest.mark.parametrize("scale", [0.0, -1.0, 1e-300, 1e39])
def test_sdpa_refused_scales(scale):
    for device in ("cpu", "cuda"):
        found = reason(FINE, scale=scale, device=device, dtype=torch.float32)
        assert "normal float32 above 0" in str(found)


def test_sdpa_accepted():
    assert reason(FINE) is None
    assert reason(FINE, mask=CAUSAL, dtype=torch.float16) is None
    heads_last = ((2, 4, 64, 64), (4 * 4096, 64, 256, 1))
    packed = ((2, 4, 64, 64), (3 * 4 * 4096, 64, 3 * 256, 1))
    assert reason(FINE, heads_last, packed) is None
    assert reason(((2, 4, 1, 256), (1024, 256, 256, 1))) is None
    assert reason(FINE, device="cpu", dtype=torch.float32) is None


def described(features):
    return (2, 4, 64, features), (4 * 64 * features, 64 * features, features, 1)


def test_sdpa_unequal_features():
    """cuDNN's kernel for keys of 192 and values of 128 features is the only one "auto" takes."""
    wide, narrow = described(192), described(128)
    assert reason(wide, wide, narrow) is None
    assert reason(wide, wide, narrow, mask=CAUSAL, dtype=torch.float16) is None
    for features in ((narrow, narrow, wide), (described(96), described(96), described(64))):
        assert "as many features of values" in str(reason(*features))
    assert "as many features of values" in str(reason(wide, wide, narrow, device="cpu", dtype=torch.float32))
    odd = narrow[0], (4 * 64 * 129, 64 * 129, 129, 1)
    assert "multiples of 8" in str(reason(wide, wide, odd))


@pytest.mark.parametrize("taken", list(SDPBackend.__members__.values()))
def test_sdpa_unequal_features_if_cudnn_is_taken(taken, monkeypatch):
    monkeypatch.setattr(backend.torch_private, "fused_sdp_choice", lambda *_, **_options: taken.value)
    tensors = (torch.empty(1, 1, 16, features, dtype=torch.bfloat16) for features in (192, 192, 128))
    assert backend._takes_cudnn(tuple(tensors), causal=True) == (taken == SDPBackend.CUDNN_ATTENTION)


@pytest.mark.parametrize("offset", range(9))
@pytest.mark.parametrize("itemsize", [2, 4])
def test_sdpa_refused_addresses(offset, itemsize):
    dtype = {2: torch.bfloat16, 4: torch.float32}[itemsize]
    memory = torch.zeros(1 << 12, dtype=dtype)
    assert memory.data_ptr() % alignment.BYTES == 0
    tensor = memory[offset:][: 2 * 4 * 8 * 16].view(2, 4, 8, 16)
    foreign = torch.from_dlpack(tensor)  # whose offset is 0
    assert foreign.storage_offset() == 0
    for each in (tensor, foreign, torch.nn.Parameter(foreign)):
        assert alignment.is_aligned(each) == (offset * itemsize % 16 == 0)
        found = alignment.reason_against(each)
        assert (found is None) == (offset * itemsize % 16 == 0)
        assert found is None or "16 bytes" in found


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


def calls(function):
    """The Python functions that a call enters. Their number stands for its host time."""
    entered = []
    function()
    sys.setprofile(lambda frame, event, _: entered.append(frame.f_code.co_name) if event == "call" else None)
    try:
        function()
    finally:
        sys.setprofile(None)
    return entered


@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize("layout", ["torch", "xformers"])
def test_call_alike_is_handed_on_by_one_check(layout, tracked):
    """Torch's own node is the last of the graph, and no more than 24 functions of Python run."""
    tensors = [torch.randn(2, 16, 4, 8, requires_grad=tracked) for _ in range(3)]
    if layout == "torch":

        def call():
            return lowtide.scaled_dot_product_attention(*tensors, is_causal=True)

    else:

        def call():
            return lowtide.memory_efficient_attention(*tensors, CAUSAL)

    assert torch.equal(call(), call())
    entered = calls(call)
    assert "choose_backend" not in entered
    assert len(entered) <= 24, entered
    if tracked:
        node = call().grad_fn
        node = node if layout == "torch" else node.next_functions[0][0]
        assert node.name().startswith("ScaledDotProduct")


def in_vmap(tensors):
    stacked = [torch.stack([each, each]) for each in tensors]
    return torch.vmap(lowtide.scaled_dot_product_attention)(*stacked)[0]


def in_forward_mode(tensors):
    query, key, value = tensors
    given = (query, key, value), tuple(torch.ones_like(each) for each in tensors)
    return torch.func.jvp(lowtide.scaled_dot_product_attention, *given)[1]


def in_autocast(tensors):
    with torch.autocast("cpu", torch.bfloat16):
        return lowtide.scaled_dot_product_attention(*tensors)


def without_fused_kernels(tensors):
    with sdpa_kernel(SDPBackend.MATH):
        return lowtide.scaled_dot_product_attention(*tensors)


def with_saved_tensors_on_cpu(tensors):
    leaves = [each.clone().requires_grad_() for each in tensors]
    with torch.autograd.graph.save_on_cpu():
        out = lowtide.scaled_dot_product_attention(*leaves)
    return torch.autograd.grad(out.sum(), leaves)[1]


def differentiated_twice(tensors):
    leaves = [each.clone().requires_grad_() for each in tensors]
    out = lowtide.scaled_dot_product_attention(*leaves)
    first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
    return torch.autograd.grad(sum(each.square().sum() for each in first), leaves)[0]


STATES = [
    in_vmap,
    in_forward_mode,
    in_autocast,
    without_fused_kernels,
    with_saved_tensors_on_cpu,
    differentiated_twice,
]


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_remembered_call_in_another_state(state):
    """The result is the same whether or not a like call was handed on before."""
    tensors = [torch.randn(2, 4, 16, 8) for _ in range(3)]
    remembered._calls.clear()
    first = state(tensors)
    for requires_grad in (False, True):
        leaves = [each.clone().requires_grad_(requires_grad) for each in tensors]
        lowtide.scaled_dot_product_attention(*leaves)
    assert remembered._calls
    assert torch.equal(state(tensors), first)


def test_remembered_call_does_not_hide_errors():
    tensors = [torch.randn(2, 16, 4, 8) for _ in range(3)]
    lowtide.memory_efficient_attention(*tensors, p=0)
    with pytest.raises(lowtide.core.errors.ArgumentTypeError, match="p must be a float"):
        lowtide.memory_efficient_attention(*tensors, p=False)
    with pytest.raises(ValueError, match="backend must be one of"):
        lowtide.memory_efficient_attention(*tensors, backend=["auto"])


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
