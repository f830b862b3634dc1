"""A call of the Triton kernels like an earlier one is recorded, and one that is not alike is not.

Shapes: B batches, M queries and keys, H heads, K features.
"""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide import attn_bias as masks
from lowtide.ops.attention import remembered
from tests.ops.attention.helpers import INTERPRETED, check, differentiate, make_case, make_upstream, ours
from tests.support.extended import all_extended_but
from tests.support.loss import skip_unless_runnable

pytest.importorskip("triton")
recorded = pytest.importorskip("lowtide.core.recording.recorded")
launch_forward = pytest.importorskip("lowtide.ops.attention.triton_backend.launch_forward")
launch_backward = pytest.importorskip("lowtide.ops.attention.triton_backend.launch_backward")

pytestmark = INTERPRETED

B, M, H, K = 2, 12, 2, 16
CAUSAL = masks.LowerTriangularMask()


@pytest.fixture(autouse=True)
def interpreter(device, monkeypatch):
    """Remember no earlier call, and record the first one that is like another."""
    skip_unless_runnable("triton", device)
    remembered.forget()
    monkeypatch.setattr(recorded, "RECORDED_CALL", 1)


@pytest.fixture
def recordings(monkeypatch):
    """The kernels that each run of a recording launches."""
    found, run = [], recorded.Recording.run

    def noted(self, tensors):
        found.append([step.kernel.fn.__name__ for step, _ in self.steps if hasattr(step, "kernel")])
        return run(self, tensors)

    monkeypatch.setattr(recorded.Recording, "run", noted)
    return found


@pytest.fixture
def launchers(monkeypatch):
    """The launchers that ran, for a call or for its rehearsal."""
    ran = []
    for module, name in ((launch_forward, "forward"), (launch_backward, "backward")):
        monkeypatch.setattr(module, name, _noting(ran, getattr(module, name)))
    return ran


def _noting(ran, launcher):
    def noted(*given):
        ran.append(launcher.__name__)
        return launcher(*given)

    return noted


def case_of(device, **more):
    return make_case(**({"B": B, "M": M, "N": M, "H": H, "K": K} | more), device=device)


def least_of(device):
    """The quickest call, for tests that ask only whether a call is recorded."""
    return case_of(device, B=1, H=1)


def results(case, upstream, **options):
    return differentiate(ours, case, upstream, backend="triton", **options)


def check_twice(case):
    """Compare a call with float64, and a second one that is alike with the first, bit for bit."""
    upstream = make_upstream(case)
    first = results(case, upstream)
    check(first, case, upstream)
    second = results(case, upstream)
    assert first.keys() == second.keys()
    for name, expected in first.items():
        assert torch.equal(second[name], expected), name
        assert second[name].stride() == expected.stride(), name


CASES = {
    "plain": {},
    "causal": {"mask": CAUSAL},
    "local": {"mask": masks.LocalAttentionFromBottomRightMask(3, 2)},
    "window": {"window": (3, 2)},
    "soft cap": {"softcap": 2.0},
    "scale": {"scale": 0.3},
    "bias": {"bias": (0, 1, 1, 1)},
    "bias of keys": {"bias": (1, 1, 0, 1)},
    "bias of queries": {"bias": (1, 1, 1, 0)},
    "causal with a bias": {"mask": CAUSAL, "bias": (0, 1, 1, 1)},
    "several tiles": {"M": 70, "N": 90, "bias": (0, 1, 1, 1)},
    "shared key heads": {"H": 4, "G": 2},
    "odd features": {"K": 5, "E": 7},
    "half precision": {"dtype": torch.bfloat16, "bias": (0, 1, 1, 1)},
    "float16": {"dtype": torch.float16, "M": 70},
    "many features": {"dtype": torch.bfloat16, "K": 264},
}


# `make test` has each option but a few in one of these two tests.
TOLD_APART = ("causal", "window", "soft cap", "scale", "bias", "half precision")
KEPT = (
    *("plain", "local", "bias of keys", "bias of queries", "causal with a bias", "odd features", "float16"),
    "shared key heads",
)


@pytest.mark.parametrize("name", all_extended_but(KEPT, CASES))
def test_like_call_has_the_same_bits(device, recordings, name):
    check_twice(case_of(device, **CASES[name]))
    assert len(recordings) == 2  # forward and backward of the second call
    assert all(recordings)


@pytest.mark.parametrize("bias", [None, pytest.param((0, 1, 1, 1), marks=pytest.mark.extended)])
@pytest.mark.parametrize("mask", all_extended_but([CAUSAL], [None, CAUSAL]))
def test_first_call_computed_again_by_checkpoint(device, mask, bias):
    """The second call saves what the first one did, though calls like it are known by then."""
    case = case_of(device, mask=mask, bias=bias)
    leaves = case.leaves()
    upstream = make_upstream(case)[0]
    found = []

    def attend(*tensors):
        return ours(replace(case, **dict(zip(leaves, tensors))), backend="triton")[0]

    for call in (2 * [lambda *own: checkpoint(attend, *own, use_reentrant=False)]) + 2 * [attend]:
        found.append(torch.autograd.grad(call(*leaves.values()), list(leaves.values()), upstream))
    for gradients in found[:-1]:
        for got, want in zip(gradients, found[-1]):
            assert torch.equal(got, want)


OWN_BIAS = {"bias": (1, 1, 1, 1)}
HALF = {"dtype": torch.bfloat16}
MANY_SMALL = {"launch_small_problems.FEWEST": 1}
FEW_QUERIES = {"launch_few_queries.FEWEST_KEYS": 1, "launch_few_queries.PROGRAMS": 8}

# Cases with launches of their own: the kernels that show it, the case, and the constants that
# decide it.
KERNELS = {
    "bias of its own": ({"query_gradient_kernel"}, OWN_BIAS | HALF, {}),
    "bias of its own, causal": ({"query_gradient_kernel"}, OWN_BIAS | HALF | {"mask": CAUSAL}, {}),
    "bias of its own, float32": ({"split_kernel", "bias_of_scores_kernel"}, OWN_BIAS, {}),
    "padded": ({"query_gradient_kernel"}, HALF | {"padded": True}, {}),
    "padded, float32": ({"split_kernel"}, {"padded": True}, {}),
    "padded, few queries": (
        {"few_queries_kernel", "merge_parts_kernel"},
        HALF | {"M": 8, "N": 200, "G": 1, "padded": True},
        FEW_QUERIES,
    ),
    "few queries": ({"few_queries_kernel", "merge_parts_kernel"}, HALF | {"M": 8, "N": 200}, FEW_QUERIES),
    "wide tile": ({"problem_gradient_kernel"}, OWN_BIAS | HALF | {"N": 70}, MANY_SMALL),
    "wide tile, padded": ({"problem_gradient_kernel"}, HALF | {"N": 70, "padded": True}, MANY_SMALL),
}


@pytest.mark.parametrize(
    "name",
    all_extended_but([name for name in KERNELS if name not in ("padded, float32", "few queries")], KERNELS),
)
def test_like_call_runs_no_launcher(device, monkeypatch, recordings, launchers, name):
    kernels, sizes, settings = KERNELS[name]
    for each, value in settings.items():
        monkeypatch.setattr(f"lowtide.ops.attention.triton_backend.{each}", value)
    sizes = dict(sizes)
    padded = sizes.pop("padded", False)
    case = case_of(device, **sizes)
    if padded:
        N = case.key.shape[1]
        valid_B111 = torch.tensor([N, 2 * N // 3], device=device).view(B, 1, 1, 1)
        case = replace(case, bias=torch.arange(N, device=device) < valid_B111)
    check_twice(case)
    upstream = make_upstream(case)
    expected = results(case, upstream)
    assert launchers == ["forward", "backward"] * 2  # of the first call, and of the rehearsal of the second
    launchers.clear()
    found = results(case, upstream)
    for part, want in expected.items():
        assert torch.equal(found[part], want), part
        assert found[part].stride() == want.stride(), part
    assert not launchers
    assert len(recordings) == 6
    assert kernels <= {*recordings[-2], *recordings[-1]}


@pytest.mark.parametrize("name", all_extended_but(TOLD_APART, [name for name in CASES if name != "plain"]))
def test_each_option_tells_calls_apart(device, recordings, name):
    check_twice(case_of(device))
    recordings.clear()
    check_twice(case_of(device, **CASES[name]))
    assert len(recordings) == 2


def changed(case, name, change):
    leaf = getattr(case, name)
    return type(case)(
        **{
            each: change(leaf) if each == name else getattr(case, each)
            for each in ("query", "key", "value", "bias", "mask", "options")
        }
    )


def heads_first(leaf):
    return leaf.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()


def shifted(leaf):
    """The same numbers and strides, one element later in memory."""
    wider = torch.empty(leaf.numel() + 1, dtype=leaf.dtype, device=leaf.device)
    return wider[1:].view(leaf.shape).copy_(leaf.detach()).requires_grad_()


@pytest.mark.parametrize("name", all_extended_but(["key", "bias"], ["query", "key", "value", "bias"]))
@pytest.mark.parametrize("change", [heads_first, torch.Tensor.detach])
def test_each_tensor_tells_calls_apart(device, recordings, change, name):
    case = case_of(device, bias=(1, 1, 1, 1))
    check_twice(case)
    recordings.clear()
    check_twice(changed(case, name, change))
    assert len(recordings) == 2


@pytest.mark.parametrize("name", all_extended_but(["query", "value"], ["query", "key", "value", "bias"]))
def test_unaligned_tensors_are_recorded_apart(device, recordings, name):
    case = case_of(device, bias=(1, 1, 1, 1))
    check_twice(case)
    recordings.clear()
    check_twice(changed(case, name, shifted))
    assert len(recordings) == 4  # of a call that is known by now


UPSTREAM = {
    "expanded": lambda x: x[:1, :1].expand_as(x),
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "shifted": lambda x: shifted(x).detach(),
}


@pytest.mark.parametrize("name", all_extended_but(["expanded"], UPSTREAM))
def test_upstream_gradients_of_any_layout(device, name):
    """Backward of calls that are alike is recorded for each layout."""
    case = case_of(device)
    check_twice(case)
    upstream = UPSTREAM[name](make_upstream(case)[0])
    for _ in range(2):
        for given in ((upstream, None), make_upstream(case)):
            check(results(case, given), case, given)


def test_logsumexp_alone_has_gradients(device, recordings):
    case = least_of(device)
    check_twice(case)
    upstream = (None, make_upstream(case)[1])
    check(results(case, upstream), case, upstream)
    assert len(recordings) == 4


def test_products_in_tf32_tell_calls_apart(device):
    case = case_of(device)
    check_twice(case)
    upstream, before = make_upstream(case), torch.get_float32_matmul_precision()
    exact = results(case, upstream)
    try:
        torch.set_float32_matmul_precision("high")
        recorded_again = results(case, upstream)
        remembered.forget()
        expected = results(case, upstream)
    finally:
        torch.set_float32_matmul_precision(before)
    for name, each in expected.items():
        assert torch.equal(recorded_again[name], each), name
    assert not torch.equal(exact["query"], expected["query"])


class Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Named(torch.Tensor):
    """A subclass, whose own code is to see the call."""


def attention_of(case, **options):
    given = case.query, case.key, case.value, case.attn_bias
    return lowtide.memory_efficient_attention(*given, backend="triton", **options)


def repeated(case, **options):
    for _ in range(2):
        attention_of(case, **options).sum().backward()


@pytest.mark.parametrize("mode", [Functions, Dispatches, lambda: torch.profiler.profile(acc_events=True)])
def test_modes_see_the_operators(device, recordings, mode):
    case = least_of(device)
    repeated(case)
    out = attention_of(case)
    recordings.clear()
    with mode():
        attention_of(case)
        if mode is not Functions:  # this mode sees the call of Tensor.backward, and nothing inside it
            out.sum().backward()
    assert not recordings


def test_subclasses_see_the_operators(device, recordings):
    case = least_of(device)
    repeated(case)
    recordings.clear()
    repeated(changed(case, "key", lambda leaf: leaf.detach().as_subclass(Named).requires_grad_()))
    assert not recordings


def test_autocast_is_not_recorded(device, recordings):
    case = least_of(device)
    repeated(case)
    recordings.clear()
    with torch.autocast(device, torch.bfloat16):
        repeated(case)
    assert not recordings


def test_dropout_is_not_recorded(device, recordings):
    case = least_of(device)
    repeated(case)
    recordings.clear()
    repeated(case, p=0.5)
    assert not recordings


def test_without_gradients(device, recordings):
    case = least_of(device)
    expected = attention_of(case)
    recordings.clear()
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(attention_of(case), expected)
    assert len(recordings) == 1


@pytest.mark.parametrize(
    "options",
    all_extended_but(
        [{"scale": True}, {"window": (1, True)}],
        [{"p": True}, {"scale": True}, {"softcap": True}, {"window": (1, True)}, {"p": 2.0}],
    ),
)
def test_errors_stay(device, options):
    """An option that equals a remembered one is still refused."""
    case = least_of(device)
    repeated(case, scale=1.0)
    repeated(case, softcap=1.0)
    repeated(case, window=(1, 1))
    with pytest.raises((TypeError, ValueError)):
        attention_of(case, **options)


def test_masks_of_sequences_are_not_alike(device):
    case = case_of(device, B=1)
    lengths = ([5, 7], [7, 5], [5, 7])
    found = []
    for each in lengths:
        mask = masks.BlockDiagonalMask.from_seqlens(each)
        found.append(
            lowtide.memory_efficient_attention(case.query, case.key, case.value, mask, backend="triton")
        )
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])


def test_restored_tensors_in_other_strides(device):
    """Hooks on saved tensors may bring them back so."""
    case = case_of(device, bias=(0, 1, 1, 1))
    upstream = make_upstream(case)
    expected = results(case, upstream)

    def turned(tensor):
        return tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor

    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(turned, lambda tensor: tensor):
            check(results(case, upstream), case, upstream)
        found = results(case, upstream)
        for name, each in expected.items():
            assert torch.equal(found[name], each), name


def test_second_derivatives(device):
    case = case_of(device, M=5, N=6, bias=(0, 1, 1, 1))
    repeated(case)
    leaves = list(case.leaves().values())

    def penalty(case, backend):
        given = case.query, case.key, case.value, case.attn_bias
        out = lowtide.memory_efficient_attention(*given, backend=backend)
        first = torch.autograd.grad(out.sin().sum(), list(case.leaves().values()), create_graph=True)
        return torch.autograd.grad(sum(each.square().sum() for each in first), list(case.leaves().values()))

    exact = penalty(case.to(torch.float64), "reference")
    for found, want, leaf in zip(penalty(case, "triton"), exact, leaves):
        assert found.shape == leaf.shape
        torch.testing.assert_close(found.double(), want, rtol=1e-4, atol=1e-5)


def test_graph_that_is_retained(device):
    case = least_of(device)
    repeated(case)
    out = attention_of(case).sum()
    leaves = list(case.leaves().values())
    first = torch.autograd.grad(out, leaves, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(out, leaves)))


def test_no_tensor_is_kept(device):
    case = case_of(device, bias=(0, 1, 1, 1), mask=CAUSAL)
    repeated(case)
    assert remembered._calls
    kept = [weakref.ref(each) for each in case.leaves().values()]
    del case
    gc.collect()
    assert [each() for each in kept] == [None] * 4
