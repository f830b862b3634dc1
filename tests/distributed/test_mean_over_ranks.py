"""The mean over all ranks' tokens: what one process computes that has all of the data."""

from itertools import product

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import lowtide
from tests.support.cards import on_cards
from tests.support.ranks import needs_gloo, run_ranks

pytestmark = needs_gloo

PATTERNS = ("equal", "unequal", "one rank ignored", "one micro-batch ignored", "one rank only", "nothing")
LOSSES = ("loss", "weighted", "chunked", "log-probs")
WRAPPERS = ("ddp", "fsdp")
# Numbers of data-parallel ranks among 2 or 4 ranks; the others are for sequence parallelism.
DATA_RANKS = {2: (1, 2), 4: (1, 2, 4)}


def scenarios(ranks, losses=LOSSES):
    combined = product(WRAPPERS, DATA_RANKS[ranks], PATTERNS, (1, 3), losses)
    return [", ".join(map(str, each)) for each in combined]


def test_two_hundred_and_more():
    """Data x sequence parallel, counts, accumulation and losses."""
    assert len(scenarios(2)) + len(scenarios(4)) == 480


@pytest.mark.parametrize(
    ("device", "ranks", "losses"),
    [
        ("cpu", 2, LOSSES[:1]),
        pytest.param("cpu", 2, LOSSES[1:], marks=pytest.mark.extended),
        pytest.param("cpu", 4, LOSSES, marks=pytest.mark.extended),
        on_cards(2, 2, LOSSES),
        on_cards(4, 4, LOSSES, marks=[pytest.mark.extended]),
    ],
    ids=str,
)
def test_same_as_one_process(tmp_path, device, ranks, losses):
    kinds, module = scenarios(ranks, losses), "tests.distributed.mean_ranks"
    for rank in run_ranks(module, tmp_path / "store", kinds, ranks=ranks, device=device):
        for kind, found in rank.items():
            assert "raised" not in found, (kind, found)
            assert found["gradient"] <= 1e-14, (kind, found)
            assert found["loss"] <= 1e-14, (kind, found)


def test_without_a_group_under_torchrun(monkeypatch):
    """It would count this rank alone, silently."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"torchrun has started 2.*init_process_group\(\) first"):
        lowtide.tokens_per_rank(torch.tensor([3, -100]))


def test_without_a_group():
    """One rank; a sum of class weights has no weight of an ignored target."""
    target, weight = torch.tensor([3, -100, 1, 0]), torch.tensor([1.0, 2.0, 3.0, torch.nan])
    assert lowtide.tokens_per_rank(target).item() == 3
    assert lowtide.tokens_per_rank([target, target[:2]]).item() == 4
    assert lowtide.tokens_per_rank(target, ignore_index=3).item() == 3
    assert lowtide.tokens_per_rank(target.to(torch.uint8), ignore_index=156).item() == 3
    assert lowtide.tokens_per_rank(target[1:3], weight=weight).item() == 2
    half = lowtide.tokens_per_rank(target[1:3], weight=weight.half())
    assert half.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_default_dtype_rounds_no_count(dtype):
    """float16 has no number above 65504, bfloat16 none between 256 and 258."""
    target, before = torch.zeros(70001, dtype=torch.long), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        count = lowtide.tokens_per_rank(target)
        loss = lowtide.linear_cross_entropy(torch.zeros(257, 4), torch.zeros(8, 4), target[:257])
        own = lowtide.tokens_per_rank(target[:257])
        divided = lowtide.linear_cross_entropy(
            torch.zeros(257, 4), torch.zeros(8, 4), target[:257], normalizer=own
        )
    finally:
        torch.set_default_dtype(before)
    assert count.dtype == torch.float32
    assert count.item() == 70001
    torch.testing.assert_close(divided, loss)


def test_compiled():
    """One graph, where a target that is no class makes NaN."""
    target, weight = torch.tensor([3, -100, 1, 0]), torch.tensor([1.0, 2.0, 3.0, 5.0])
    own = torch.compile(lowtide.tokens_per_rank, backend="aot_eager", fullgraph=True)
    assert own([target, target[:2]]).item() == 4
    assert own(target, weight=weight).item() == 8
    assert own(target + 1, weight=weight).isnan()
    with pytest.raises(IndexError, match="target must hold classes from 0 to 3"):
        lowtide.tokens_per_rank(target + 1, weight=weight)


def test_traced():
    """Where numbers are not to be read, the result is what it is without a look at them."""
    target, weight = torch.tensor([3, -100, 1, 0]), torch.tensor([1.0, 2.0, 3.0, 5.0])
    with FakeTensorMode() as mode:
        fake = lowtide.tokens_per_rank(mode.from_tensor(target), weight=mode.from_tensor(weight))
    assert (fake.shape, fake.dtype) == ((), torch.float32)
    graph = make_fx(lambda target: lowtide.tokens_per_rank(target, weight=weight))(target)
    assert graph(target).item() == 8
    assert graph(target + 1).isnan()
    assert torch.vmap(lowtide.tokens_per_rank)(target.view(2, 2)).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"target": []}, ValueError, "target must hold one tensor at least"),
        ({"target": [1, 2]}, TypeError, r"target\[0\] must be a torch.Tensor, got int"),
        ({"target": torch.ones(3)}, TypeError, r"pass torch.zeros\(rows, dtype=torch.long\)"),
        ({"target": torch.zeros(3, dtype=torch.long), "ignore_index": 0.5}, TypeError, "must be an int"),
        (
            {"target": torch.zeros(3, dtype=torch.long), "weight": 3},
            TypeError,
            "weight must be a torch.Tensor",
        ),
    ],
    ids=str,
)
def test_errors(arguments, kind, message):
    with pytest.raises(kind, match=message):
        lowtide.tokens_per_rank(**arguments)
