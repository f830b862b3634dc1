import math

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models

from lowtide.tools.demo.config import SIZES
from lowtide.tools.demo.data import Corpus
from lowtide.tools.demo.trainer import Trainer, learning_rate
from lowtide.tools.errors import UserError
from tests.support.commands import rows_of
from tests.support.extended import all_extended_but


def train(trainer, steps):
    while len(trainer.history) < steps:
        trainer.step()
    return [step.loss for step in trainer.history]


@pytest.mark.parametrize("tied", all_extended_but([True], [False, True]))
def test_losses_train_same_model(make_trainer, tied):
    ours = train(make_trainer(loss="lowtide", tied=tied), 40)
    eager = train(make_trainer(loss="eager", tied=tied), 40)
    assert max(abs(a - b) for a, b in zip(ours, eager)) < 1e-4
    assert ours[0] == pytest.approx(math.log(512), abs=0.1)
    assert sum(ours[-5:]) / 5 < 5.1


@pytest.mark.parametrize("loss", ["lowtide", "eager"])
@pytest.mark.parametrize("tied", [False, True])
def test_step_matches_plain_training(make_trainer, loss, tied):
    trainer, plain = make_trainer(loss=loss, tied=tied), make_trainer(loss=loss, tied=tied)
    train(trainer, 4)
    for number in range(4):
        tokens, targets = plain.batch(plain.corpus.train, number)
        F.cross_entropy(plain.model.head(plain.model(tokens)).flatten(0, 1), targets.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(plain.model.parameters(), 1.0)
        plain.optimizer.param_groups[0]["lr"] = learning_rate(number)
        plain.optimizer.step()
        plain.optimizer.zero_grad()
    for ours, theirs in zip(trainer.model.parameters(), plain.model.parameters()):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_memory_measured_in_some_steps(make_trainer):
    trainer = make_trainer(loss="eager")
    train(trainer, 12)
    assert [step.number for step in trainer.history if step.peak_bytes is not None] == [0, 10]


@pytest.mark.parametrize("loss", ["lowtide", "eager"])
def test_measuring_changes_no_result(make_trainer, loss, monkeypatch):
    measured = train(make_trainer(loss=loss), 3)
    monkeypatch.setattr("lowtide.tools.demo.trainer.MEASURE_EVERY", 1)
    assert train(make_trainer(loss=loss), 3) == measured


@pytest.mark.extended
def test_default_run_memory_ten_times_less(make_config):
    """What the demonstration shows, on one step of it."""
    ids = torch.randint(32_768, (5000,), dtype=torch.int32)
    peak = {}
    for loss in ("lowtide", "eager"):
        config = make_config(loss=loss, vocab_size=32_768, **SIZES["cpu"])
        trainer = Trainer(config, Corpus("random", Tokenizer(models.BPE()), ids, ids))
        trainer.step()
        peak[loss] = trainer.history[0].peak_bytes
    logits = config.tokens_per_step * 32_768 * 4
    gradients = (32_768 + config.tokens_per_step) * config.width * 4
    assert peak["eager"] >= 3 * logits
    assert peak["lowtide"] <= 64 * 2**20 + gradients
    assert peak["eager"] >= 10 * peak["lowtide"]


def test_resumed_run_is_identical(make_trainer):
    whole = make_trainer()
    losses = train(whole, 12)
    first = make_trainer()
    train(first, 7)
    first.save()
    second = make_trainer()
    second.resume()
    assert len(second.history) == 7
    assert train(second, 12) == losses
    for ours, theirs in zip(second.model.parameters(), whole.model.parameters()):
        assert torch.equal(ours, theirs)
    assert second.validation_loss() == whole.validation_loss()


def test_log_matches_history(make_trainer):
    trainer = make_trainer()
    train(trainer, 3)
    trainer.save()
    rows = rows_of(trainer.config.directory / "log.csv")
    assert [float(row["loss"]) for row in rows] == [step.loss for step in trainer.history]
    assert [row["peak_bytes"] for row in rows] == [str(trainer.history[0].peak_bytes), "", ""]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"width": 128}, "width 64, not 128"),
        ({"tied": True}, "tied False, not True"),
        ({"seed": 1, "depth": 1}, "depth 2, not 1; seed 0, not 1"),
        ({"vocab_size": 400}, "vocab_size 512, not 400"),
    ],
)
def test_checkpoint_of_other_run_refused(make_trainer, change, said):
    trainer = make_trainer()
    trainer.step()
    trainer.save()
    path = trainer.config.directory / "checkpoint.pt"
    before = path.read_bytes()
    with pytest.raises(UserError, match=f"{said}.*nothing was changed; give another --out"):
        make_trainer(**change).resume()
    assert path.read_bytes() == before


def test_checkpoint_of_other_text_refused(make_trainer, text):
    trainer = make_trainer()
    trainer.step()
    trainer.save()
    text.write_text(text.read_text(encoding="utf-8") + "more", encoding="utf-8")
    with pytest.raises(UserError, match=r"another run \(text .*nothing was changed"):
        make_trainer().resume()


@pytest.mark.parametrize("content", ["garbage", "the weights of something else"])
def test_checkpoint_malformed_refused(make_trainer, content):
    trainer = make_trainer()
    path = trainer.config.directory / "checkpoint.pt"
    path.parent.mkdir(parents=True)
    if content == "garbage":
        path.write_bytes(b"garbage")
    else:
        torch.save({"weight": torch.zeros(3)}, path)
    before = path.read_bytes()
    with pytest.raises(UserError, match="cannot be read as a checkpoint"):
        trainer.resume()
    assert path.read_bytes() == before


def test_finished_run_continued(make_trainer):
    first = make_trainer(steps=4)
    train(first, 4)
    first.save()
    longer = make_trainer(steps=8)
    longer.resume()
    assert train(longer, 8) == train(make_trainer(steps=8), 8)


def test_fewer_steps_refused(make_trainer):
    trainer = make_trainer(steps=4)
    train(trainer, 4)
    trainer.save()
    with pytest.raises(UserError, match=r"already at step 4: give --steps 4 or more, or another --out"):
        make_trainer(steps=2).resume()


@pytest.mark.parametrize("missing", ["identity", "history", "model"])
def test_checkpoint_incomplete_refused(make_trainer, missing):
    trainer = make_trainer()
    trainer.step()
    trainer.save()
    path = trainer.config.directory / "checkpoint.pt"
    content = torch.load(path)
    torch.save({name: part for name, part in content.items() if name != missing}, path)
    with pytest.raises(UserError, match="cannot be read as a checkpoint"):
        make_trainer().resume()
