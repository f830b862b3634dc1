"""A call of the Triton kernels like an earlier one is recorded, and gives the same bits.

Shapes: B batches, M queries and keys.
"""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lowtide.ops.attention import remembered
from tests.ops.attention.helpers import INTERPRETED, make_upstream, ours
from tests.ops.attention.operator.remembered.helpers import (
    CASES,
    CAUSAL,
    KEPT,
    B,
    attention_of,
    case_of,
    check_twice,
    least_of,
    repeated,
    results,
)
from tests.support.extended import all_extended_but

pytest.importorskip("triton")
pytestmark = INTERPRETED


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
MANY_SMALL = {"launch_small_problems.FEWEST_PROBLEMS": 1}
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


def test_without_gradients(device, recordings):
    case = least_of(device)
    expected = attention_of(case)
    recordings.clear()
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(attention_of(case), expected)
    assert len(recordings) == 1


def test_no_tensor_is_kept(device):
    case = case_of(device, bias=(0, 1, 1, 1), mask=CAUSAL)
    repeated(case)
    assert remembered._calls
    kept = [weakref.ref(each) for each in case.leaves().values()]
    del case
    gc.collect()
    assert [each() for each in kept] == [None] * 4
