"""Trained logits: a real checkpoint, of a few steps."""

import argparse
import dataclasses
import inspect

import pytest
import torch
import torch.nn.functional as F

from lowtide.tools.bench.cases import CASES, Mode
from lowtide.tools.bench.trained import trained_cases
from lowtide.tools.bench.truth import exact
from lowtide.tools.demo.config import Config
from lowtide.tools.demo.data import load_corpus
from lowtide.tools.demo.trainer import Trainer
from lowtide.tools.errors import UserError

(SMOKE,) = (case for case in CASES if case.smoke and case.device == "cpu")
CASE = dataclasses.replace(SMOKE, tokens=100)
CONTEXT = 32


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "argparse.txt"
    path.write_text(inspect.getsource(argparse), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def trainer(text, tmp_path_factory):
    """Four steps, and saved."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        sizes = {"vocab_size": 300, "width": 64, "depth": 1, "context": CONTEXT, "batch": 4}
        out = tmp_path_factory.mktemp("run")
        config = Config("lowtide", "cpu", out, text, **sizes, steps=4, save_every=4, tied=False, seed=0)
        trainer = Trainer(config, load_corpus(text, 300, CONTEXT))
        for _ in range(4):
            trainer.step()
        trainer.save()
        yield trainer


def test_tensors_of_model_on_held_out_text(trainer, text):
    (case,) = trained_cases([CASE], trainer.config.out, text)
    assert (case.name, case.tokens, case.features, case.classes) == ("smoke-cpu-trained", 100, 64, 300)
    input_ND, weight_VD, target_N = case.inputs(requires_grad=True)
    assert torch.equal(weight_VD, trainer.model.head.weight)
    valid = trainer.corpus.valid[: 4 * CONTEXT + 1].long()
    assert torch.equal(target_N, valid[1:101])
    windows = valid[: 4 * CONTEXT].view(4, CONTEXT)
    own_ND = trainer.model(windows).flatten(0, 1)[:100]
    torch.testing.assert_close(input_ND, own_ND)
    logits_NV = F.linear(own_ND, weight_VD)
    assert case.largest_logit == pytest.approx(logits_NV.abs().max().item(), rel=1e-5)
    loss, *_ = exact(input_ND, weight_VD, target_N, Mode.STEP)
    assert loss.item() == pytest.approx(F.cross_entropy(logits_NV, target_N).item(), rel=1e-5)


def test_inputs_fresh_in_case_dtype(trainer, text):
    half = dataclasses.replace(CASE, tokens=64, dtype=torch.bfloat16)
    whole, small = trained_cases([CASE, half], trainer.config.directory, text)
    first = whole.inputs(requires_grad=False)
    for tensor in first:
        tensor.zero_()
    assert whole.inputs(requires_grad=False)[0].any()
    x, w, target = small.inputs(requires_grad=True)
    assert (x.shape, x.dtype, w.dtype, len(target)) == ((64, 64), torch.bfloat16, torch.bfloat16, 64)
    assert x.requires_grad
    assert w.requires_grad
    assert torch.equal(w, trainer.model.head.weight.bfloat16())
    assert trainer.model.head.weight.any()


def test_input_refused(trainer, text, tmp_path):
    out = trainer.config.out
    with pytest.raises(UserError, match=r"no checkpoint.pt; make one with: lowtide train --out"):
        trained_cases([CASE], tmp_path, text)
    other = tmp_path / "other.txt"
    other.write_text(text.read_text() * 2)
    with pytest.raises(UserError, match=r"another text than --data .*other.txt: give the --data of"):
        trained_cases([CASE], out, other)
    many = dataclasses.replace(CASE, tokens=10**6)
    with pytest.raises(UserError, match="tokens of the text are held out, and the case has 1000000"):
        trained_cases([CASE, many], out, text)
    (tmp_path / "checkpoint.pt").write_bytes(b"no checkpoint")
    with pytest.raises(UserError, match="cannot be read as a checkpoint"):
        trained_cases([CASE], tmp_path, text)
    torch.save({"identity": {}}, tmp_path / "checkpoint.pt")
    with pytest.raises(UserError, match="cannot be read as a checkpoint"):
        trained_cases([CASE], tmp_path, text)
