"""Which calls skip ignored rows: by their plan, with a frozen weight, and in CUDA graphs."""

import pytest
import torch

from tests.support.loss import (
    fused,
    make_inputs,
    no_synchronisation,
    planned,
    workspace_for,
)

pytest.importorskip("triton")

from lowtide.core.kernels import backend
from tests.ops.linear_cross_entropy.engines.gemm.ignored_rows import (
    OPTIONS,
    PATTERNS,
    N,
    V,
    any_number_of_tokens,  # noqa: F401
    inputs_for,
    with_ignored,
)
from tests.ops.linear_cross_entropy.on_exponentials import (
    everywhere,  # noqa: F401
    run,
)
from tests.ops.linear_cross_entropy.planning.test_workspace_size import planned_on_hopper
from tests.support.cuda_graphs import captured
from tests.support.extended import all_extended_but

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.extended
def test_class_blocks_take_all_rows(device):
    inputs = inputs_for(device, "prefixes", dtype=torch.bfloat16)

    def by_class(plan):
        return plan.weight_gradient == "class_blocks"

    workspace = workspace_for(inputs, by_class, backend="triton")
    assert not planned(inputs, workspace, backend="triton").skips_ignored
    run(inputs, workspace=workspace, factor=2.0 if device == "cuda" else 4.0)


@pytest.mark.parametrize("case", ["no gradients", "more features than classes"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_calls_that_take_all_rows(device, case, reduction):
    """They count no memory for the gathered rows."""
    inputs = inputs_for(device, "prefixes", dtype=torch.bfloat16)
    if case == "no gradients":
        inputs.linear_weight.requires_grad_(False)
        inputs.input.requires_grad_(False)
    else:
        inputs = make_inputs(N, 8 * V, V, device=device, dtype=torch.bfloat16)
    options = {"backend": "triton", "reduction": reduction}
    assert not planned(inputs, None, **options).skips_ignored
    assert torch.isfinite(fused(inputs, **options)).all()


@pytest.mark.parametrize("pattern", all_extended_but(["all", "prefixes"], PATTERNS))
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("options", all_extended_but([{}], [{}, *OPTIONS]), ids=str)
def test_frozen_weight(device, options, at_once, reduction, pattern):
    """Rows are gathered in dX's memory by one chunk, and by several in memory that is counted."""
    inputs = inputs_for(device, pattern)
    inputs.linear_weight.requires_grad_(False)
    workspace, planning = None, {"backend": "triton", "reduction": reduction}
    if not at_once:
        workspace = workspace_for(inputs, lambda plan: N // 4 <= plan.rows < N // 2, **planning)
    plan = planned(inputs, workspace, **planning)
    assert plan.skips_ignored
    assert (plan.rows >= N) == at_once
    upstream = torch.randn(N, device=device) if reduction == "none" else -0.5
    run(inputs, reduction=reduction, upstream=upstream, workspace=workspace, **options)


def test_frozen_weight_skips_more_seldom(monkeypatch):
    """dX is then half of the call, so what its GEMM loses where rows are skipped weighs more."""
    monkeypatch.undo()
    monkeypatch.setattr(backend, "pipelines_on", lambda device: True)
    shape = (2048, 1024, 50304)
    trained, frozen = (
        planned_on_hopper(monkeypatch, *shape, torch.bfloat16, None, wanted=wanted)[0]
        for wanted in ((True, True), (True, False))
    )
    assert (trained.skips_ignored, frozen.skips_ignored) == (True, False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_synchronisation_and_graphs(reduction):
    inputs = with_ignored(make_inputs(2048, 64, 8200, device="cuda", dtype=torch.bfloat16), "prefixes")
    leaves = tuple(inputs.leaves().values())

    def step():
        loss = fused(inputs, reduction=reduction)
        return loss.detach(), *torch.autograd.grad(loss.sum(), leaves)

    step()
    with no_synchronisation("cuda"):
        step()
    graph, found = captured(step)
    for pattern in ("none", "random", "all but one"):
        inputs.target.copy_(with_ignored(inputs, pattern).target)
        graph.replay()
        assert all(map(torch.equal, found, step()))


def test_which_calls_skip(monkeypatch):
    """Those that take at most a tenth longer if no row is ignored."""
    monkeypatch.undo()
    monkeypatch.setattr(backend, "pipelines_on", lambda device: True)
    skips = [
        planned_on_hopper(monkeypatch, *shape, torch.bfloat16, workspace)[0].skips_ignored
        for shape, workspace in (
            ((16384, 4096, 128256), 1 << 30),
            ((16384, 4096, 131072), 1 << 26),  # class blocks
            ((4096, 4096, 128256), 1 << 31),
            ((2048, 4096, 128256), None),  # its parts take more than the small product of the default
            ((4096, 2304, 256000), 1 << 32),  # 288 tiles of dX: the last 36 are divided
            ((1024, 4096, 128256), 1 << 30),
            ((32768, 768, 50264), 1 << 30),
            ((32768, 768, 50264), 1 << 28),
            ((4096, 768, 50264), 1 << 30),  # 96 tiles of dX, all of them divided
            ((16384, 1024, 151936), 1 << 28),  # 16 tiles of dX in a chunk, for 132 multiprocessors
        )
    ]
    assert skips == [True, False, True, True, True, False, True, True, True, True]
