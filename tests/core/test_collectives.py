"""What moves between the hosts of a group that moves tensors of cards alone."""

import pytest
import torch.distributed as dist

from tests.support.ranks import run_ranks

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs torch.distributed with gloo"
)


def test_hosts_of_overlapping_groups(tmp_path):
    """Ranks in other numbers of groups find each other, in two groups of the same ranks too."""
    for found in run_ranks("tests.core.collectives_ranks", tmp_path / "store", ["between_hosts"], ranks=3):
        result = found["between_hosts"]
        assert "raised" not in result, result
        assert result["found"] == result["expected"]
