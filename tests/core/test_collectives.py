"""What moves between the hosts of a group that moves tensors of cards alone."""

from tests.support.ranks import needs_gloo, run_ranks

pytestmark = needs_gloo


def test_hosts_of_overlapping_groups(tmp_path):
    """Ranks in other numbers of groups find each other, in two groups of the same ranks too."""
    for found in run_ranks("tests.core.collectives_ranks", tmp_path / "store", ["between_hosts"], ranks=3):
        result = found["between_hosts"]
        assert "raised" not in result, result
        assert result["found"] == result["expected"]
