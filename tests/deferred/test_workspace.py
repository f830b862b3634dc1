"""`defer_logits(workspace=)` bounds what each fused loss holds, and changes no number.

Shapes: N tokens, D features, V classes.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import lowtide
from tests.deferred.helpers import GPT, differentiated, make
from tests.deferred.test_memory import ROWS, USES, D, prepared, step
from tests.ops.chunked_loss.helpers import close
from tests.support.extended import all_extended_but

MIB = 2**20
BY_OPERATORS = ("cross_entropy", "classes second, soft cap", "smoothing, class weights", "shifted")


SLOW = ("entropy", "classes second, soft cap", "largest", "per token", "cross_entropy")


@pytest.mark.parametrize("name", all_extended_but([name for name in USES if name not in SLOW], USES))
@pytest.mark.parametrize("workspace", [4 * MIB, 16 * MIB])
def test_workspace_bounds_peak(name, workspace):
    model, tokens, targets = prepared("cpu", torch.float32)

    def peak_of_a_step(workspace):
        with lowtide.defer_logits(model, workspace=workspace) as deferral:
            few = (each[:, :8].contiguous() for each in (tokens, targets))
            step(model, *few, USES[name])  # torch keeps some of a first step
            with lowtide.peak_memory("cpu") as peak:
                step(model, tokens, targets, USES[name])
        assert deferral.materialized == {}
        return peak.bytes

    gradients, activations = 2 * model.lm_head.weight.nbytes, 8 * ROWS["cpu"] * D * 4
    peak = peak_of_a_step(workspace)
    assert peak <= workspace + gradients + activations
    if name in BY_OPERATORS:  # their default is 64 MiB
        assert peak < peak_of_a_step(None) / 1.5


LOSSES = {
    "fused": lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten(), ignore_index=-1),
    "by chunks": lambda z, y: F.cross_entropy((z * z).flatten(0, 1), y.flatten(), ignore_index=-1),
    "of each token": lambda z, y: F.cross_entropy(z.mT, y, ignore_index=-1, reduction="none"),
    "log-probabilities": lambda z, y: z.log_softmax(-1).gather(-1, y.clamp(0)[..., None]),
    "logsumexp": lambda z, y: z.logsumexp(-1),
    "largest": lambda z, y: z.topk(3).values,
}


@pytest.mark.parametrize("name", LOSSES)
def test_workspace_same_numbers(name):
    model, tokens, targets = make(dtype=torch.float64)

    def found():
        return differentiated(model, LOSSES[name](model(tokens)[0], targets))

    expected = found()
    with lowtide.defer_logits(model, workspace=2**14):  # a row by chunks takes 6 KiB of these
        close(found(), expected)


@pytest.mark.parametrize("name", LOSSES)
def test_workspace_too_small(name):
    model, tokens, targets = make(dtype=torch.float32)
    with lowtide.defer_logits(model, workspace=64):
        logits = model(tokens)[0]
        with pytest.raises(ValueError, match=r"workspace must hold .*, got 64 bytes"):
            LOSSES[name](logits, targets)


@pytest.mark.parametrize("workspace", ["64MiB", 1e6, True])
def test_workspace_malformed(workspace):
    model = GPT()
    with pytest.raises(TypeError, match="workspace must be a number of bytes"):
        lowtide.defer_logits(model, workspace=workspace)
    assert type(model.lm_head) is torch.nn.Linear


@pytest.mark.parametrize("workspace", [0, -1])
def test_workspace_zero(workspace):
    model = GPT()
    with pytest.raises(ValueError, match="workspace must be a number of bytes above 0, or None, got"):
        lowtide.defer_logits(model, workspace=workspace)
    assert type(model.lm_head) is torch.nn.Linear


def test_workspace_numpy_integer():
    model, tokens, targets = make(dtype=torch.float32)
    with lowtide.defer_logits(model, workspace=np.int64(2**20)) as deferral:
        model(tokens, targets)[1].backward()
        LOSSES["by chunks"](model(tokens)[0], targets).backward()
    assert deferral.fused == 2


def test_workspace_compile():
    model, tokens, targets = make(dtype=torch.float32)
    expected = model(tokens, targets)[1]
    lowtide.defer_logits(model, workspace=2**20)
    compiled = torch.compile(lambda *given: model(*given)[1], fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens, targets), expected)
