"""Fixtures: no earlier call is remembered, and what runs is noted."""

import pytest

from lowtide.ops.attention import remembered
from tests.support.loss import skip_unless_runnable


@pytest.fixture(autouse=True)
def interpreter(device, monkeypatch):
    """Remember no earlier call, and record the first one that is like another."""
    skip_unless_runnable("triton", device)
    from lowtide.core.recording import recorded  # imports Triton

    remembered.forget()
    monkeypatch.setattr(recorded, "RECORDED_CALL_OF_LAYERS", 1)


@pytest.fixture
def recordings(monkeypatch):
    """The kernels that each run of a recording launches."""
    from lowtide.core.recording import recorded  # imports Triton

    found, run = [], recorded.Recording.run

    def noted(self, tensors):
        found.append([step.kernel.fn.__name__ for step, _ in self.steps if hasattr(step, "kernel")])
        return run(self, tensors)

    monkeypatch.setattr(recorded.Recording, "run", noted)
    return found


@pytest.fixture
def launchers(monkeypatch):
    """The launchers that ran, for a call or for its rehearsal."""
    from lowtide.ops.attention.triton_backend import launch_backward, launch_forward  # import Triton

    ran = []
    for module, name in ((launch_forward, "forward"), (launch_backward, "backward")):
        monkeypatch.setattr(module, name, _noting(ran, getattr(module, name)))
    return ran


def _noting(ran, launcher):
    def noted(*given):
        ran.append(launcher.__name__)
        return launcher(*given)

    return noted
