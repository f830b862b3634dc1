"""Pipeline stages whose loss function computes the head and the loss: one process's gradients."""

import pytest

from tests.support.cards import DEVICES
from tests.support.ranks import needs_gloo, run_ranks

pytestmark = needs_gloo

KINDS = ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble")


@pytest.mark.parametrize("device", DEVICES)
def test_schedules(tmp_path, device):
    module = "tests.distributed.pipeline_ranks"
    for place, rank in enumerate(run_ranks(module, tmp_path / "store", KINDS, device=device)):
        for kind in KINDS:
            assert "raised" not in rank[kind], rank[kind]
            errors = rank[kind]["errors"]
            assert any("lm_head" in name for name in errors) == (place == 1)
            assert max(errors.values()) < 1e-14, kind
