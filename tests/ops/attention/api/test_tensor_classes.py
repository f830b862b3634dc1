"""Tensors that are more than numbers in memory: torch's causal biases, and classes with a meaning
of their own."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import lowtide
from lowtide import attn_bias as masks
from tests.ops.attention.helpers import check, differentiate, make_case, make_upstream, ours

LENGTHS = [(12, 12), (12, 20), (1, 20)]


@pytest.mark.parametrize(("M", "N"), LENGTHS)
@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("G", [4, 2])
def test_causal_bias_of_torch(device, make, M, N, G):
    """Over as many query heads as it is no number for."""
    query, key, value = (
        torch.randn(3, heads, length, 16, device=device, requires_grad=True)
        for heads, length in ((4, M), (G, N), (G, N))
    )
    bias = make(M, N)
    out = lowtide.scaled_dot_product_attention(query, key, value, bias, enable_gqa=True)
    shown = bias._materialize(query.device)
    expected = F.scaled_dot_product_attention(query, key, value, shown, enable_gqa=True)
    assert type(out) is torch.Tensor
    torch.testing.assert_close(out, expected)
    upstream = torch.randn_like(out)
    tensors = (query, key, value)
    for got, want in zip(*(torch.autograd.grad(each, tensors, upstream) for each in (out, expected))):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(("M", "N"), LENGTHS)
@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("options", [{}, {"p": 0.3, "seed": 1}, {"softcap": 2.0, "window": (3, 1)}], ids=str)
def test_causal_bias_of_torch_sdpa_signature(device, make, M, N, options):
    own = masks.LowerTriangularMask()
    if make is causal_lower_right:
        own = masks.LowerTriangularFromBottomRightMask()
    case = make_case(2, M, N, mask=own, device=device, **options)
    upstream = make_upstream(case)

    def function(case):
        return ours(type(case)(case.query, case.key, case.value, None, make(M, N), case.options))

    check(differentiate(function, case, upstream), case, upstream)


def test_causal_bias_compile():
    torch._dynamo.reset()
    query, key, value = (torch.randn(2, 3, 12, 8) for _ in range(3))
    bias = causal_lower_right(12, 12)

    def function(query, key, value):
        return lowtide.scaled_dot_product_attention(query, key, value, bias)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(query, key, value), function(query, key, value))


def test_causal_bias_lengths_mismatched():
    query = torch.zeros(1, 2, 12, 8)
    with pytest.raises(ValueError, match="made for 12 queries and 20 keys, got 12 and 12"):
        lowtide.scaled_dot_product_attention(query, query, query, causal_upper_left(12, 20))
    with pytest.raises(ValueError, match="attn_mask must be a tensor or None beside is_causal"):
        lowtide.scaled_dot_product_attention(query, query, query, causal_upper_left(12, 12), is_causal=True)


class Trivial(torch.Tensor):
    """Says nothing of its own."""


class Meaningful(torch.Tensor):
    """Means twice its numbers, to whoever asks it."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is F.scaled_dot_product_attention:
            query, *rest = (each.as_subclass(torch.Tensor) * 2 for each in args)
            return function(query, *rest, **(kwargs or {}))
        return super().__torch_function__(function, types, args, kwargs)


def nested(layout):
    return torch.nested.nested_tensor([torch.randn(3, 2, 8)] * 2, layout=layout)


FOREIGN = {
    "nested": (lambda dense: nested(torch.strided), "got a nested one; put its sequences"),
    "jagged": (lambda dense: nested(torch.jagged), "got a nested one; put its sequences"),
    "sparse": (lambda dense: dense.to_sparse(), r"layout torch.sparse_coo; use \w+.to_dense\(\)"),
    "compressed": (lambda dense: dense.to_sparse_csr(), r"layout torch.sparse_csr; use \w+.to_dense\(\)"),
    "mkldnn": (lambda dense: dense.to_mkldnn(), r"layout torch._mkldnn; use \w+.to_dense\(\)"),
    "masked": (
        lambda dense: torch.masked.masked_tensor(dense, dense > 0),
        "got MaskedTensor, which has a meaning of its own",
    ),
    "a class of the caller": (
        lambda dense: dense.as_subclass(Meaningful),
        r"got Meaningful, which has a meaning of its own .*as_subclass\(torch.Tensor\)",
    ),
    "torch's bias": (
        lambda dense: causal_upper_left(8, 8),
        "got CausalBias, which has a meaning of its own",
    ),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize(
    "function", [lowtide.memory_efficient_attention, lowtide.scaled_dot_product_attention]
)
def test_tensor_subclass_refused(function, name, place):
    make, message = FOREIGN[name]
    if (name, place) == ("torch's bias", 3):  # this class is understood, but not below another mask
        foreign = masks.LowerTriangularMask().add_bias(make(None))
    else:
        foreign = make(torch.randn(2, 8, 8) if name != "compressed" else torch.randn(8, 8))
    arguments = [torch.randn(2, 8, 8) for _ in range(3)] + [None]
    arguments[place] = foreign
    with pytest.raises(TypeError, match=message) as caught:
        function(*arguments)
    names = (
        "query",
        "key",
        "value",
        "attn_bias" if function is lowtide.memory_efficient_attention else "attn_mask",
    )
    assert str(caught.value).startswith(f"{names[place]} must be")
    if place == 3 and isinstance(foreign, torch.Tensor):
        with pytest.raises(TypeError, match=message):
            function(*arguments[:3], masks.LowerTriangularMask().add_bias(foreign))


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_tensor_subclass_without_protocol(device, backend):
    case = make_case(device=device)
    upstream = make_upstream(case)
    own = type(case)(
        *(leaf.detach().as_subclass(Trivial).requires_grad_() for leaf in case.leaves().values())
    )
    found = differentiate(ours, own, upstream, backend=backend)
    for part, want in differentiate(ours, case, upstream, backend=backend).items():
        assert torch.equal(found[part].as_subclass(torch.Tensor), want), part
    parameters = [torch.nn.Parameter(leaf.detach()) for leaf in case.leaves().values()]
    out = lowtide.memory_efficient_attention(*parameters, backend=backend)
    assert type(out) is torch.Tensor
    torch.testing.assert_close(out, ours(case)[0])


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_distributed_tensor(mesh):
    plain = torch.randn(1, 8, 2, 4)
    tensor = distribute_tensor(plain, mesh, [Replicate()])
    with pytest.raises(
        TypeError, match=r"query must be a plain tensor, got DTensor; pass query.to_local\(\)"
    ):
        lowtide.memory_efficient_attention(tensor, tensor, tensor)
    local = tensor.to_local()
    expected = lowtide.memory_efficient_attention(plain, plain, plain)
    assert torch.equal(lowtide.memory_efficient_attention(local, local, local), expected)
