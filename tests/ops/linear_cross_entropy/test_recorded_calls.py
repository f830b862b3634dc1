"""A call of the loss that is recorded has the bits of the call that was not, in each engine.

Shapes: N tokens, D features, V classes.
"""

import pytest
import torch

import lowtide
from lowtide.ops.linear_cross_entropy.engines import row_loss_triton
from lowtide.ops.linear_cross_entropy.operator import remembered_call
from tests.support.loss import interpreted

pytest.importorskip("triton")
recorded = pytest.importorskip("lowtide.core.recording.recorded")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

BF16 = torch.bfloat16
CASES = {
    "float32": ((12, 16, 40), {}, {}),
    "frozen weight": ((12, 16, 40), {"frozen": 1}, {}),
    "frozen input": ((12, 16, 40), {"frozen": 0}, {}),
    "sum": ((12, 16, 40), {}, {"reduction": "sum"}),
    "half precision": ((12, 16, 40), {"dtype": BF16}, {}),
    "float16": ((12, 16, 40), {"dtype": torch.float16}, {}),
    "many options": ((12, 16, 40), {}, {"label_smoothing": 0.1, "softcap": 3.0, "z_loss": 0.1}),
    "several chunks": ((80, 16, 512), {}, {"workspace": 130_000}),
}


@pytest.mark.parametrize("name", CASES)
def test_same_bits(device, monkeypatch, name):
    if device == "cpu" and not interpreted():
        pytest.skip("needs Triton's interpreter")
    monkeypatch.setattr(recorded, "RECORDED_CALL", 1)
    # It reads a target on the CPU, which a rehearsal cannot.
    monkeypatch.setattr(row_loss_triton, "check_classes", lambda *_: None)
    (N, D, V), options, given = CASES[name]
    leaves = [torch.randn(rows, D).to(device, options.get("dtype", torch.float32)) for rows in (N, V)]
    target = torch.randint(V, (N,)).to(device)
    target[3] = -100
    for place, each in enumerate(leaves):
        each.requires_grad_(place != options.get("frozen"))
    trained = [each for each in leaves if each.requires_grad]
    runs, run = [], recorded.Recording.run
    plans, make_plan = [], remembered_call.make_plan

    def counted(self, tensors):
        runs.append(self)
        return run(self, tensors)

    def planned(*call):
        plans.append(make_plan(*call))
        return plans[-1]

    monkeypatch.setattr(recorded.Recording, "run", counted)
    monkeypatch.setattr(remembered_call, "make_plan", planned)
    found = []
    for _ in range(3):
        loss = lowtide.linear_cross_entropy(*leaves, target, backend="triton", **given)
        found.append((loss.detach(), *torch.autograd.grad(loss, trained)))
    assert len(runs) == 2
    (plan,) = plans
    assert (plan.rows < N) == (name == "several chunks")
    for results in found[1:]:
        assert all(map(torch.equal, results, found[0]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a card does not wait for this check")
def test_targets_are_still_checked():
    x, w = torch.randn(12, 16, requires_grad=True), torch.randn(40, 16, requires_grad=True)
    target = torch.randint(40, (12,))
    for _ in range(3):
        lowtide.linear_cross_entropy(x, w, target, backend="triton").backward()
    target[5] = 40
    with pytest.raises(IndexError, match="classes from 0 to 39"):
        lowtide.linear_cross_entropy(x, w, target, backend="triton")
