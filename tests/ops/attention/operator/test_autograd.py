"""What autograd may do with a call: everything, exactly."""

import contextlib

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide import attn_bias as masks
from lowtide.ops.attention.definition.operands import AttentionOptions
from tests.ops.attention.helpers import check, differentiate, make_case, make_upstream, ours
from tests.support.extended import all_extended_but

CASES = {
    "plain": {},
    "causal": {"mask": masks.LowerTriangularMask()},
    "more queries than keys": {"M": 6, "N": 3, "mask": masks.LowerTriangularFromBottomRightMask()},
    "bias": {"bias": (0, 1, 0, 1)},
    "bias of rows": {"bias": (1, 0, 1, 0)},
    "window, soft cap": {"window": (1, 1), "softcap": 2.0, "scale": 0.7},
    "dropout": {"p": 0.4, "seed": 2},
    "all": {
        "bias": (0, 1, 1, 1),
        "mask": masks.LowerTriangularMask(),
        "p": 0.2,
        "seed": 4,
        "softcap": 3.0,
    },
    "sequences": {"B": 1, "mask": masks.BlockDiagonalMask.from_seqlens([2, 3], [1, 4])},
}


def small(name, **more):
    sizes = {"B": 2, "M": 5, "N": 5, "H": 2, "G": 1, "K": 3, "E": 2}
    return make_case(**(sizes | CASES[name] | more), dtype=torch.float64)


def as_function(case, **options):
    """Of the leaves alone; -inf, whose differences are NaN, is left out of the logsumexp."""

    def function(*leaves):
        changed = type(case)(*leaves, *(None,) * (4 - len(leaves)), case.mask, case.options)
        out, logsumexp = ours(changed, **options)
        return out, logsumexp.masked_fill(logsumexp == -torch.inf, 0)

    return function, tuple(case.leaves().values())


@pytest.mark.parametrize("name", all_extended_but(["plain", "bias", "window, soft cap", "sequences"], CASES))
def test_derivatives_first_and_second_order_both_modes(name):
    function, leaves = as_function(small(name), backend="torch")
    assert torch.autograd.gradcheck(function, leaves, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradcheck(function, leaves, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(function, leaves, check_fwd_over_rev=True, fast_mode=True)


def plain(causal, softcap=None, backend="auto"):
    mask = masks.LowerTriangularMask() if causal else None

    def function(*leaves):
        return lowtide.memory_efficient_attention(*leaves, mask, softcap=softcap, backend=backend)

    return function


@pytest.mark.parametrize("causal", [False, True])
def test_delegated_derivatives(causal):
    leaves = tuple(
        torch.randn(1, length, heads, 3, dtype=torch.float64, requires_grad=True)
        for length, heads in ((4, 4), (5, 2), (5, 2))
    )
    function = plain(causal, backend="sdpa")
    assert torch.autograd.gradcheck(function, leaves, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)
    assert torch.autograd.gradcheck(plain(causal), leaves, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(plain(causal), leaves, check_fwd_over_rev=True, fast_mode=True)


@pytest.mark.parametrize("name", CASES)
def test_transforms(name):
    function, leaves = as_function(small(name), backend="torch")
    weights = [torch.randn_like(part) for part in function(*leaves)]

    def loss(*leaves):
        return sum((part * weight).sum() for part, weight in zip(function(*leaves), weights))

    places = tuple(range(len(leaves)))
    expected = torch.autograd.grad(loss(*leaves), leaves)
    found = torch.func.grad(loss, places)(*(leaf.detach() for leaf in leaves))
    for got, want in zip(found, expected):
        torch.testing.assert_close(got, want)
    stacked = tuple(torch.stack([leaf.detach(), 2 * leaf.detach()]) for leaf in leaves)
    batched = torch.vmap(torch.func.grad(loss, places))(*stacked)
    for place in places:
        torch.testing.assert_close(batched[place][0], expected[place])


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_retained_graph(device, backend):
    case = make_case(device=device)
    out = lowtide.memory_efficient_attention(case.query, case.key, case.value, backend=backend)
    first, second = torch.randn_like(out), torch.randn_like(out)
    leaves = list(case.leaves().values())
    once = torch.autograd.grad(out, leaves, first, retain_graph=True)
    torch.autograd.grad(out, leaves, second, retain_graph=True)
    again = torch.autograd.grad(out, leaves, first)
    for got, want in zip(again, once):
        assert torch.equal(got, want)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, leaves, first)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_hooks_once(device, backend):
    case = make_case(device=device)
    fired = []
    for name, leaf in case.leaves().items():
        leaf.register_hook(lambda grad, name=name: fired.append(name))
    lowtide.memory_efficient_attention(case.query, case.key, case.value, backend=backend).sum().backward()
    assert sorted(fired) == ["key", "query", "value"]


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_query_is_key_is_value(device, backend):
    x = torch.randn(2, 40, 3, 8, device=device, requires_grad=True)
    upstream = torch.randn_like(x)
    (shared,) = torch.autograd.grad(lowtide.memory_efficient_attention(x, x, x, backend=backend), x, upstream)
    own = [x.detach().clone().requires_grad_() for _ in range(3)]
    parts = torch.autograd.grad(lowtide.memory_efficient_attention(*own, backend=backend), own, upstream)
    torch.testing.assert_close(shared, sum(parts))


@pytest.mark.parametrize("options", [{}, {"p": 0.4}, {"softcap": 2.0}])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(device, options, reentrant):
    case = make_case(device=device)
    leaves = list(case.leaves().values())

    def function(*leaves):
        return lowtide.memory_efficient_attention(*leaves, **options)

    found = []
    for call in (function, lambda *leaves: checkpoint(function, *leaves, use_reentrant=reentrant)):
        torch.manual_seed(1)
        out = call(*leaves)
        for leaf in leaves:
            leaf.grad = None
        out.square().sum().backward()
        found.append([out, *(leaf.grad for leaf in leaves)])
    for got, want in zip(*found):
        assert torch.equal(got, want)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_saved_tensors_moved(device, backend):
    case = make_case(device=device)
    leaves = list(case.leaves().values())
    upstream = torch.randn(2, 37, 4, 8, device=device)

    def gradients():
        out = lowtide.memory_efficient_attention(*leaves, backend=backend)
        return torch.autograd.grad(out, leaves, upstream)

    expected = gradients()
    with torch.autograd.graph.save_on_cpu():
        found = gradients()
    for got, want in zip(found, expected):
        assert torch.equal(got, want)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_saved_tensor_changed_in_place(device, backend):
    query, key, value = (torch.randn(1, 9, 2, 4, device=device) for _ in range(3))
    value.requires_grad_()
    out = lowtide.memory_efficient_attention(query, key, value, backend=backend)
    query.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_grad(device, backend, mode):
    case = make_case(device=device)
    tensors = (case.query, case.key, case.value)
    with mode():
        out = lowtide.memory_efficient_attention(*tensors, backend=backend)
    assert not out.requires_grad
    assert torch.equal(out, lowtide.memory_efficient_attention(*tensors, backend=backend))


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(device, options, dtype):
    case = make_case(device=device)
    upstream = torch.randn(2, 37, 4, 8, device=device, dtype=dtype)
    tensors = [case.query, case.key, case.value]
    with torch.autocast(device, dtype):
        out = lowtide.memory_efficient_attention(*tensors, **options)
    gradients = torch.autograd.grad(out, tensors, upstream)
    assert out.dtype == dtype
    assert all(gradient.dtype == torch.float32 for gradient in gradients)
    by_hand = lowtide.memory_efficient_attention(*(each.to(dtype) for each in tensors), **options)
    assert torch.equal(out, by_hand)
    for got, want in zip(gradients, torch.autograd.grad(by_hand, tensors, upstream)):
        if device == "cpu" or options:  # torch's own CUDA kernels add up in any order
            assert torch.equal(got, want)


@pytest.mark.parametrize("wanted", [("query",), ("key", "value"), ("bias",)])
def test_double_backward_of_subset(wanted):
    case = small("all")
    case.trained(*wanted)
    function, leaves = as_function(case)
    everything = (case.query, case.key, case.value, case.bias)
    assert torch.autograd.gradgradcheck(lambda *_: function(*everything), leaves, fast_mode=True)


def test_higher_derivatives_several_chunks(monkeypatch):
    """The chunks of queries in which the transforms go do not matter."""
    from lowtide.ops.attention.operator import higher_order

    function, leaves = as_function(small("all", M=9, N=9))

    def curvature():
        out = sum(part.square().sum() for part in function(*leaves))
        first = torch.autograd.grad(out, leaves, create_graph=True)
        return torch.autograd.grad(sum(part.square().sum() for part in first), leaves)

    whole = curvature()
    monkeypatch.setattr(higher_order, "WORKSPACE", 12 * 2 * 2 * 9 * 8 * 4)
    for got, want in zip(curvature(), whole):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(("M", "N"), [(20, 33), (33, 20)])
def test_delegated_causal_mask_top_left(M, N):
    case = make_case(M=M, N=N, mask=masks.LowerTriangularMask(), dtype=torch.float64)
    tensors = (case.query, case.key, case.value, case.mask)
    handed, definition = (
        lowtide.memory_efficient_attention(*tensors, backend=backend) for backend in ("sdpa", "reference")
    )
    torch.testing.assert_close(handed, definition)


def test_delegated_values_within_budget(device):
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for mask in (None, masks.LowerTriangularMask()):
            case = make_case(2, 65, 65, 4, 2, 16, mask=mask, dtype=dtype, device=device)
            upstream = (make_upstream(case)[0], None)

            def function(case):
                out = lowtide.memory_efficient_attention(case.query, case.key, case.value, case.mask)
                return out, ours(case, backend="torch")[1]

            check(differentiate(function, case, upstream), case, upstream)


@pytest.mark.parametrize("settings", [None, [SDPBackend.MATH], [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]])
@pytest.mark.parametrize("autocast", [False, True])
def test_dense_kernel_never_used(settings, autocast):
    """Whatever torch's settings are, which stay what they were. Autocast leaves float64 alone."""
    dtype = torch.float64 if autocast else torch.float32
    case = make_case(1, 64, 64, 2, 2, 16, dtype=dtype)
    tensors = (case.query, case.key, case.value)

    seen = set()

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.add(function.name())
            return function(*args, **(kwargs or {}))

    around = contextlib.nullcontext() if settings is None else sdpa_kernel(settings)
    with around, torch.autocast("cpu", torch.bfloat16, enabled=autocast), Names():
        before = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()
        out = lowtide.memory_efficient_attention(*tensors)
        assert (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()) == before
    assert out.dtype == dtype
    assert any("flash_attention_for_cpu" in name for name in seen)
    assert not any("math" in name or "bmm" in name for name in seen)


def test_operator_without_derivative_raises():
    """It says so, as torch would only warn that there is none."""
    query = torch.randn(1, 1, 4, 8, requires_grad=True)
    given = (query, query, query, None, None, None, None, False, *AttentionOptions(1.0, softcap=2.0))
    with pytest.raises(RuntimeError, match="has no derivative of its own"):
        torch.ops.lowtide.attention(*given)
    with torch.no_grad():
        torch.ops.lowtide.attention(*given)
