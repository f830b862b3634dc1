"""transformers.Trainer, unmodified: the losses of a run are those without a deferral."""

import pytest
import torch

from tests.support.extended import all_extended_but

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from lowtide.integrations.transformers import TransformersDeferralCallback  # noqa: E402
from tests.deferred.helpers import norm, within_eager  # noqa: E402
from tests.integrations.zoo import T, V, build  # noqa: E402


class Data(torch.utils.data.Dataset):
    def __init__(self, count=16):
        generator = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(3, V, (count, T), generator=generator)
        self.lengths = torch.randint(4, T, (count,), generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, item):
        labels = self.tokens[item].clone()
        labels[self.lengths[item] :] = -100  # so that micro-batches count differently
        return {"input_ids": self.tokens[item], "labels": labels}


def trained(path, deferred, *, kind="LlamaForCausalLM", dtype=torch.float32, resume=None, **options):
    """([logged numbers, *parameters], the callback)"""
    callback = TransformersDeferralCallback()
    model = build(kind).to(dtype)
    arguments = {
        "output_dir": str(path),
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "optim": "sgd",  # Adam would make steps of what is 0 but for rounding
        "learning_rate": 0.1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "seed": 1,
    }
    metrics = {"compute_metrics": options.pop("compute_metrics", None)}
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(**arguments | options),
        train_dataset=Data(),
        eval_dataset=Data(6),
        callbacks=[callback] if deferred else [],
        **metrics,
    )
    trainer.train(resume_from_checkpoint=resume)
    logged = [entry[name] for entry in trainer.state.log_history for name in LOGGED if name in entry]
    return [torch.tensor(logged), *(each.detach().clone() for each in model.parameters())], callback


LOGGED = ("loss", "eval_loss", "eval_likelihood")


def likelihood(found):
    log_p = torch.tensor(found.predictions).log_softmax(-1)
    return {"likelihood": log_p[..., 5].mean().item()}


CHECKPOINTING = "activation_checkpointing"  # since transformers 5.23
if not hasattr(transformers.TrainingArguments, CHECKPOINTING):
    CHECKPOINTING = "gradient_checkpointing"

CASES = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 4},  # with num_items_in_batch
    "bf16": {"bf16": True},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "checkpointing": {CHECKPOINTING: True},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2},
    "metrics": {"eval_strategy": "steps", "eval_steps": 2, "compute_metrics": likelihood},
    "soft cap": {"kind": "Gemma2ForCausalLM"},
    "masked": {"kind": "BertForMaskedLM"},
    "sequence to sequence": {"kind": "T5ForConditionalGeneration"},
}


@pytest.mark.parametrize("name", all_extended_but(["plain", "accumulation", "metrics", "masked"], CASES))
def test_run(name, tmp_path):
    options = CASES[name]
    eager, _ = trained(tmp_path, False, **options)
    exact, _ = trained(tmp_path, False, **{**options, "bf16": False}, dtype=torch.float64)
    found, callback = trained(tmp_path, True, **options)
    assert callback.deferral.materialized == {}
    if name != "label smoothing":  # there the Trainer computes the loss from log-probabilities
        assert callback.deferral.fused == 4 * options.get("gradient_accumulation_steps", 1)
    assert type(callback.deferral.head) is torch.nn.Linear
    dtype = torch.bfloat16 if options.get("bf16") else torch.float32
    for ours, theirs, want in zip(found, eager, exact):
        within_eager(ours, theirs, want.double(), dtype, size=8 * norm(want))


def test_run_accumulated(tmp_path):
    """The loss and the steps of one large batch, to rounding: micro-batches have unequal counts."""
    large, _ = trained(tmp_path, True, dtype=torch.float64, per_device_train_batch_size=8, max_steps=2)
    parts, callback = trained(tmp_path, True, dtype=torch.float64, gradient_accumulation_steps=4, max_steps=2)
    assert callback.fused == 8
    for ours, want in zip(parts, large, strict=True):
        torch.testing.assert_close(
            ours, want, rtol=1e-6 if want.dtype == torch.float32 else 1e-12, atol=1e-12
        )


def test_run_resumed(tmp_path):
    """From a checkpoint of a deferred run, to the bit."""
    whole, _ = trained(tmp_path, True, save_strategy="steps", save_steps=2, optim="adamw_torch")
    found, _ = trained(tmp_path, True, resume=str(tmp_path / "checkpoint-2"), optim="adamw_torch")
    for ours, want in zip(found, whole):
        assert torch.equal(ours, want)


@pytest.mark.extended
def test_run_resumed_without_callback(tmp_path):
    """From a checkpoint of a deferred run, not deferred any more: the run that never was."""
    options = {"save_strategy": "steps", "save_steps": 2}
    eager, _ = trained(tmp_path / "eager", False, **options)
    exact, _ = trained(tmp_path / "exact", False, dtype=torch.float64)
    trained(tmp_path / "deferred", True, **options)
    found, _ = trained(tmp_path / "again", False, resume=str(tmp_path / "deferred" / "checkpoint-2"))
    for ours, theirs, want in zip(found, eager, exact):
        within_eager(ours, theirs, want.double(), torch.float32, size=8 * norm(want))


def test_run_after_error(tmp_path):
    """The logits are real in between, and deferred in the second run, as in a smaller retry."""
    callback, model = TransformersDeferralCallback(), build("LlamaForCausalLM")
    state, control = transformers.TrainerState(), transformers.TrainerControl()
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    callback.on_train_begin(arguments, state, control, model=model)
    first = callback.deferral
    callback.on_train_begin(arguments, state, control, model=model)  # no on_train_end: it raised
    model.train()
    batch = {name: each[None] for name, each in Data()[0].items()}
    model(**batch).loss.backward()
    assert (first.fused, callback.deferral.fused) == (0, 1)
    callback.on_train_end(arguments, state, control)
    assert type(callback.deferral.head) is torch.nn.Linear


def test_run_on_several_gpus(tmp_path):
    class Arguments:
        n_gpu = 2

    with pytest.raises(ValueError, match="start one process a GPU"):
        TransformersDeferralCallback().on_train_begin(
            Arguments(), None, None, model=build("LlamaForCausalLM")
        )
