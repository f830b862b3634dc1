"""The head under FSDP2 as people arrange it: one process's gradients, and how often it is gathered.

tests/ops/chunked_loss/test_distributed.py and tests/deferred/test_distributed.py have more of these
two.
"""

from itertools import product

import pytest
import torch

from tests.support.cards import DEVICES
from tests.support.ranks import needs_gloo, run_ranks

pytestmark = needs_gloo

# A head that is freed after its forward is gathered again for its backward, as torch does it.
# Between micro-batches it is not freed.
ONCE = [
    *("parameter, own, kept", "parameter, own, default", "parameter, root, default, bias"),
    *("parameter, with norm, kept", "parameter, tied, kept", "parameter, tied, root, default"),
    *("parameter, own, default, outside", "parameter, root, default, outside", "chunked, with norm, kept"),
    *("parameter, own, kept, accumulated, no reshard", "parameter, own, default, accumulated, no reshard"),
    *("log-probs, own, default", "log-probs, own, default, bias", "module, own, default, bias"),
    *("chunked, own, default", "chunked, root, default", "chunked, tied, root, default"),
    *("chunked, own, default, accumulated, no reshard", "chunked, own, default, outside"),
    *("deferred, own, kept", "deferred, root, default", "deferred, with norm, kept", "deferred, tied, kept"),
    *("deferred, root, default, bias", "deferred, root, default, accumulated, no reshard"),
    *("deferred, root, kept, outside, bias", "deferred by chunks, root, kept, outside, bias"),
    *("chunked, own, default, adapted", "deferred, own, kept, adapted", "deferred, root, default, adapted"),
    *("masked rows, own, kept, outside", "masked rows, root, default, outside"),
    *("deferred rows, root, kept, outside",),
    *("compiled parameter, own, default", "compiled log-probs, own, default, outside, bias"),
    *("compiled parameter, root, default",),
]
TWICE = [
    *("parameter, own, reshard", "parameter, root, reshard"),
    *("parameter, own, reshard, accumulated, no reshard", "chunked, own, reshard", "deferred, root, reshard"),
]
# A unit of several modules whose head is not called. It is freed if torch ends its forward.
UNCALLED = ["parameter, with norm, default", "parameter, tied, reshard"]
# The root unit is freed after its forward, and gathered again for the loss, twice for backward.
OUTSIDE = ["deferred, root, reshard, outside", "deferred, root, reshard, outside, bias"]
# The head is gathered already, and no gradient comes to it through the unit's own hooks.
GATHERED = [
    f"{case}, {loss}, {where}"
    for case in ("evaluated frozen", "frozen", "apart", "apart frozen")
    for loss in ("parameter", "log-probs", "chunked")
    for where in ("own", "root", "with norm")
]
GATHERED += ["frozen, compiled parameter, own", "apart frozen, compiled log-probs, with norm"]
GATHERED += ["frozen, compiled parameter, root", "frozen, compiled divergence, root"]
STALE = [
    f"stale, {loss}, {where}"
    for loss in ("parameter", "log-probs", "chunked")
    for where in ("own", "with norm")
]
ROUNDED = ["rounded, parameter, own", "rounded, log-probs, own", "rounded, chunked, own"]
MISTAKEN = {  # keys are part of the error's message
    "refused, full_tensor, own": "linear_weight must be the parameter itself",
    "refused, bias, own": "linear_bias must be the parameter itself",
    "refused, bias copy, own": "linear_bias must be a parameter that FSDP2 shards with linear_weight",
    "refused, shard_head, own": "linear_weight must be the parameter itself",
    "refused, tokens_sharded, own": "lowtide.shard_head",
    "refused, detached, own": "linear_weight must be the parameter that FSDP2 shards, got a DTensor that is "
    "computed from it, as by .detach() or state_dict(): its shards would be taken for a tensor-parallel",
}
MIXED = [
    *("parameter, own, default, mixed", "chunked, own, default, mixed"),
    *("chunked, with norm, kept, mixed", "deferred, own, kept, mixed"),
]
RAISING = {  # keys are part of the error's message
    "fused full_tensor, own, kept": r"its gradient would be that of this rank's tokens alone",
    "deferred by chunks, root, reshard, outside": "these logits need the whole head, which FSDP2 has sharded",
    "deferred by chunks, root, reshard, outside, bias": "compute them in the forward of that unit",
    "chunked, root, reshard, outside": r"head.weight is sharded by FSDP2 here, outside of the forward",
}
FORBIDDEN = ["full_tensor, own, reshard", "full_tensor, root, default", "partial full_tensor, own, reshard"]


def root_ends_units():
    """True where the root's forward ends that of a unit of several modules, as by torch 2.13.
    By 2.11 the unit stays gathered until the last of them has run, there or behind it."""
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    return hasattr(FSDPState, "_force_complete_incomplete_states")


def largest(found):
    """NaN if any is, which max() may pass over."""
    return torch.tensor([*found["errors"].values()]).max().item()


@pytest.fixture(scope="module", params=DEVICES)
def results(request, tmp_path_factory):
    """Of all scenarios, by rank. Those that raise come last, as they leave FSDP's hooks halfway."""
    eager = ["eager, own, kept, mixed", *FORBIDDEN]
    kinds = [*ONCE, *TWICE, *UNCALLED, *OUTSIDE, *MIXED, *eager, *GATHERED, *STALE, *ROUNDED]
    kinds += [*MISTAKEN, *RAISING]
    store = tmp_path_factory.mktemp("ranks") / "store"
    return run_ranks("tests.distributed.fsdp_ranks", store, kinds, device=request.param)


@pytest.mark.parametrize("kind", [*ONCE, *TWICE, *UNCALLED, *OUTSIDE])
def test_exact(results, kind):
    for rank in results:
        assert "raised" not in rank[kind], rank[kind]
        assert largest(rank[kind]) <= 1e-6, rank[kind]["errors"]


@pytest.mark.parametrize("kind", [*ONCE, *TWICE, *UNCALLED])
def test_head_collectives_per_step(results, kind):
    """One gather, or two if it is freed after forward; one reduction, none of a frozen head."""
    for rank in results:
        times = 2 if kind in TWICE or (kind in UNCALLED and root_ends_units()) else 1
        assert rank[kind]["gathers"] == times, rank[kind]
        assert rank[kind]["reductions"] == ("adapted" not in kind), rank[kind]


@pytest.mark.parametrize("kind", MIXED)
def test_mixed_precision(results, kind):
    """bfloat16 parameters, gradients reduced in float32: as near as eager torch's."""
    for rank in results:
        assert largest(rank[kind]) <= 2 * largest(rank["eager, own, kept, mixed"])


@pytest.mark.parametrize("kind", GATHERED)
def test_gathered_already(results, kind):
    for rank in results:
        assert rank[kind]["error"] <= 1e-6, rank[kind]


@pytest.mark.parametrize("kind", STALE)
def test_evaluation_leaves_nothing_stale(results, kind):
    """An optimizer's step behind an evaluation is seen by the next call."""
    for rank in results:
        assert rank[kind]["moved"] > 1e-2
        assert rank[kind]["error"] <= 1e-6


@pytest.mark.parametrize("kind", ROUNDED)
def test_output_dtype_leaves_the_loss(results, kind):
    for rank in results:
        assert rank[kind]["dtype"] == "torch.float32"


@pytest.mark.parametrize("kind", MISTAKEN)
def test_refuses(results, kind):
    for rank in results:
        assert MISTAKEN[kind] in rank[kind]["raised"]


@pytest.mark.parametrize("kind", RAISING)
def test_raises(results, kind):
    for rank in results:
        assert RAISING[kind] in rank[kind]["raised"]


def test_full_tensor_is_wrong(results):
    """What must not be: the head's gradient is silently not reduced. The root unit's is plain."""
    for rank in results:
        wrong, plain, twice = (rank[kind]["errors"] for kind in FORBIDDEN)
        assert wrong["head.weight"] > 0.3
        assert all(each <= 1e-6 for name, each in wrong.items() if name != "head.weight")
        assert all(each <= 1e-6 for each in plain.values())
        assert abs(twice["head.weight"] - 1) <= 1e-6  # the sum over two ranks in place of their mean


ARRANGEMENTS = ("own", "root", "with norm", "tied", "tied, root", "own, bias", "root, bias")
RESHARD = ("reshard", "kept", "default")
STEPS = ("once", "accumulated", "accumulated, no reshard", "outside")


@pytest.mark.extended
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("loss", ["parameter", "log-probs", "chunked", "deferred"])
def test_every_arrangement(tmp_path, loss, device):
    """Right, or refused with a sentence."""
    kinds = [f"{loss}, {', '.join(each)}" for each in product(ARRANGEMENTS, RESHARD, STEPS)]
    kinds.sort(key=_raises)
    for rank in run_ranks("tests.distributed.fsdp_ranks", tmp_path / "store", kinds, device=device):
        for kind, found in rank.items():
            if _raises(kind):
                said = ("fully_shard", "convert all torch.Tensor")
                assert any(each in found["raised"] for each in said), kind
            else:
                assert "raised" not in found, (kind, found)
                assert largest(found) <= 1e-6, (kind, found)


def _raises(kind):
    """The head is freed before the loss needs it, or not gathered at all. A unit of several modules
    whose head is called outside is still gathered, if the root's forward has ended the unit's: the
    head then begins another. If not, the head is the last of its unit's modules."""
    loss, *given = kind.split(", ")
    freed, outside = "kept" not in given, "outside" in given
    if "root" in given:
        return loss == "chunked" and outside and "reshard" in given
    several = "with norm" in given or "tied" in given
    return loss == "deferred" and freed and not (several and outside and root_ends_units())
