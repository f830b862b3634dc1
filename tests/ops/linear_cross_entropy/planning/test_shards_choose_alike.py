"""Ranks of a divided head choose one engine, whatever classes and tokens each of them has.

On tensors without data. Shapes: N tokens of a rank, D features, V classes of all ranks, V_r of one.
"""

from itertools import product

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.core.bfloat16_units import gemm
from lowtide.ops.linear_cross_entropy.operator import planner
from lowtide.ops.linear_cross_entropy.planning import requirements
from lowtide.ops.linear_cross_entropy.ranks.agreement import Agreement
from tests.support.extended import all_extended_but
from tests.support.loss import call_of_sizes

V, D = 128256, 1024
SHARDS = (0, 1, 17, 4000, V // 2, V - 1, V)  # classes of a rank in uneven layouts: none, few, all
TOKENS = (0, 1, 64, 4096)
OPTIONS = (
    {},
    {"reduction": "none"},
    {"log_probs": True},
    {"softcap": 30.0},
    {"label_smoothing": 0.1},
    {"label_smoothing": 0.1, "softcap": 30.0},
    {"segments": 4},
)


@pytest.fixture(params=["cuda", "cpu"])
def device(request, monkeypatch):
    """A Hopper card, or a CPU that has products of bfloat16."""
    if request.param == "cuda":
        pytest.importorskip("triton")
    monkeypatch.setattr(requirements, "_has_tensor_maps", lambda device: device.type == "cuda")
    monkeypatch.setattr(gemm, "against", lambda: None)
    return request.param


def plan_of(device, N, V_r, **options):
    """The plan of a rank with so many tokens and classes, in a workspace with room for any."""
    with FakeTensorMode():
        return planner.make_plan(call_of_sizes(N, D, V_r, device=device, **options))


@pytest.mark.parametrize("options", all_extended_but(OPTIONS[:3], OPTIONS), ids=str)
def test_one_engine(device, options):
    """By shards of any sizes, tokens that are replicated or not, dtypes and wanted gradients."""
    for tokens_sharded, dtype, wanted in product(
        (False, True), (torch.bfloat16, torch.float32), ((True, True), (True, False))
    ):
        place = {"group": "g", "ranks": 2, "num_classes": V, "tokens_sharded": tokens_sharded}
        plans = [
            plan_of(device, N, V_r, dtype=dtype, wanted=wanted, **place, **options)
            for N in (TOKENS if tokens_sharded else (64,))
            for V_r in SHARDS
        ]
        assert len({each.engine for each in plans}) == 1, (tokens_sharded, dtype, wanted)
        # None counts on a chunk of all tokens where the ranks agree on smaller ones.
        chunks = Agreement(None, 32, (64, 64), 1, None, ())
        for each in plans:
            assert each.agreed(chunks).weight_gradient != "single_product"
            if tokens_sharded:
                assert each.weight_gradient != "single_product"


def test_few_replicated_tokens_take_a_single_product(device):
    """A rank takes it if all agree on one chunk, and tokens are few beside its own classes."""
    place = {"group": "g", "ranks": 2, "num_classes": V}
    for N, few in ((16, True), (64, True), (1024, True), (4096, True), (16384, False)):
        plan = plan_of(device, N, V // 2, **place)
        whole = Agreement(None, plan.rows, (N, N), 1, None, ())
        fits = device == "cuda" or N <= 64
        assert (plan.agreed(whole).weight_gradient == "single_product") == (few and fits)


def test_one_process_chooses_by_sizes(device):
    """The rules above can fail: these sizes change the choice of one process."""
    plans = [plan_of(device, N, V_r) for N in (64, 4096) for V_r in (17, V)]
    assert len({each.engine for each in plans}) > 1
    if device == "cuda":
        assert {each.weight_gradient for each in plans} >= {"single_product"}
