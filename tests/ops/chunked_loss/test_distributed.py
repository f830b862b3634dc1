"""DDP and FSDP2, with two processes that have unequal numbers of chunks: exact, one all-gather and
one reduce-scatter of the head a step, and nobody waits for ever."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lowtide.ops.chunked_loss import chunked_loss
from tests.ops.chunked_loss.helpers import D, V, cross_entropy, make
from tests.support.cards import DEVICES
from tests.support.ranks import needs_gloo, run_ranks

pytestmark = needs_gloo

DDP = ["ddp", "ddp recompute", "ddp outside"]
ONCE = [
    *("fsdp", "fsdp recompute", "fsdp per row", "fsdp wrapped", "fsdp outside", "fsdp recompute outside"),
    *("fsdp root", "fsdp root outside", "fsdp reshard once"),
    *("fsdp default", "fsdp default outside", "fsdp recompute default", "fsdp recompute default outside"),
    *("fsdp workspace", "fsdp recompute workspace outside"),
]
TWICE = ["fsdp reshard", "fsdp recompute reshard"]


@pytest.fixture(scope="module", params=DEVICES)
def results(request, tmp_path_factory):
    """Of all scenarios, by rank."""
    store = tmp_path_factory.mktemp("ranks") / "store"
    kinds = [*DDP, *ONCE, *TWICE]
    return run_ranks("tests.ops.chunked_loss.two_ranks", store, kinds, device=request.param)


@pytest.mark.parametrize("kind", [*DDP, *ONCE, *TWICE])
def test_exact_on_all_ranks(results, kind):
    for rank in results:
        assert "raised" not in rank[kind], rank[kind]["raised"]


@pytest.mark.parametrize("kind", [*ONCE, *TWICE])
def test_head_collectives_per_step(results, kind):
    """However many chunks; a second all-gather is what reshard_after_forward=True asks for."""
    for rank in results:
        assert rank[kind]["reductions"] == 1
        assert rank[kind]["gathers"] == (2 if kind in TWICE else 1)


@pytest.mark.parametrize("kind", [kind for kind in ONCE if "workspace" in kind])
def test_chunk_rows_same_on_all_ranks(results, kind):
    """Without asking; one has eleven rows, the other four."""
    first, second = (rank[kind]["sizes"] for rank in results)
    assert 1 < first[0] < 4
    assert first[0] == second[0]


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_head_collectives_per_chunk_refused(one_rank):
    from torch.distributed.fsdp import fully_shard

    _, hidden, labels = make("linear", dtype=torch.float32)
    with pytest.raises(ValueError, match=r"must not be a DistributedDataParallel.*pass head.module"):
        chunked_loss(cross_entropy, DistributedDataParallel(nn.Linear(D, V)), hidden, labels)

    nested = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, V))
    fully_shard(nested[1])
    for head in (nested, fully_shard(nested)):
        with pytest.raises(ValueError, match="must be one FSDP unit, but has others inside: 1"):
            chunked_loss(cross_entropy, head, hidden, labels)
    hidden_in_partial = partial(nn.Module.__call__, fully_shard(nn.Linear(D, V)))
    with pytest.raises(ValueError, match=r"head.0 is an FSDP unit, which only head may be"):
        chunked_loss(cross_entropy, hidden_in_partial, hidden, labels)

    hooked = fully_shard(nn.Linear(D, V))
    hooked.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="forward hooks of its own"):
        chunked_loss(cross_entropy, hooked, hidden, labels)


def test_fsdp_unit_unchanged(one_rank):
    from torch.distributed.fsdp import fully_shard

    _, hidden, labels = make("linear", dtype=torch.float32)
    head = fully_shard(nn.Linear(D, V))
    before = set(vars(head))
    chunked_loss(cross_entropy, head, hidden, labels, chunk_size=5).backward()
    assert set(vars(head)) == before
    assert head.weight.grad is not None
