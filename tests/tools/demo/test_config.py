import pytest

from lowtide.tools.demo.config import Parallel
from lowtide.tools.errors import UserError


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"parallel": Parallel.data, "ranks": 3}, "--batch must be a multiple of the 3 ranks.*: 8$"),
        ({"parallel": Parallel.shard_head, "ranks": 16}, "--batch must be a multiple of the 16 ranks.*: 8$"),
        ({"parallel": Parallel.tensor, "ranks": 3}, "--width must be a multiple of the 3 ranks.*: 64$"),
        ({"parallel": Parallel.tensor, "ranks": 2, "tied": True}, "--tied goes together with .*data.*tensor"),
        (
            {"parallel": Parallel.shard_head, "ranks": 2, "tied": True},
            "--tied goes together with .*shard_head",
        ),
        ({"width": 96}, "--width must be a multiple of 64"),
    ],
)
def test_ranks_that_do_not_fit(make_config, changes, said):
    with pytest.raises(UserError, match=said):
        make_config(**changes)


def test_directories_of_runs(make_config):
    """Runs of other ways, or of another number of ranks, do not share a checkpoint."""
    places = {make_config(parallel=each, ranks=n).directory.name for each in Parallel for n in (1, 2)}
    assert places == {f"{each.value}-{n}" for each in Parallel for n in (1, 2)}
    assert make_config().directory.name == "lowtide"
