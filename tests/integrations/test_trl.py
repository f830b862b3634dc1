"""TRL's trainers, unmodified: what they log is what they log by themselves, with no logits made."""

import copy
import pickle
import random

import pytest
import torch

from tests.support.extended import all_extended_but

trl = pytest.importorskip("trl", minversion="1.15")
peft = pytest.importorskip("peft")
import datasets  # noqa: E402
import tokenizers  # noqa: E402
import transformers  # noqa: E402
from trl.trainer.utils import add_fused_lm_head  # noqa: E402

from lowtide.integrations.trl import Forward, TRLDeferralCallback  # noqa: E402
from tests.deferred.helpers import norm, within_eager  # noqa: E402
from tests.integrations.zoo import V, batch, build  # noqa: E402

# TRL calls things by names that transformers has changed.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
FIELDS = ("log_probs", "entropy", "mean_logits")

MODELS = {
    "Llama": ("LlamaForCausalLM", {}),
    "soft cap": ("Gemma2ForCausalLM", {"final_logit_softcapping": 5.0}),
    "scale": ("CohereForCausalLM", {"logit_scale": 0.3}),
    "scale, tied": ("GraniteForCausalLM", {"logits_scaling": 3.0, "tie_word_embeddings": True}),
    "experts": ("MixtralForCausalLM", {"output_router_logits": True}),
}


def fields_and_gradients(model, ask):
    model.zero_grad(set_to_none=True)
    found = ask(model)
    total = sum(
        (each * (place + 1)).sum() for place, each in enumerate((found["log_probs"], found["entropy"]))
    )
    if found.get("aux_loss") is not None:
        total = total + found["aux_loss"]
    total.backward()
    fields = {name: found[name].detach() for name in (*FIELDS, "loss")}
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return fields, gradients, found["is_top1"]


def asked(model):
    return model(**batch(), fused_lm_head=True)


def exactly(model):
    """From the model's own logits, at a temperature of 0.7."""
    inputs = batch()
    labels = inputs.pop("labels")[:, 1:]
    counted = labels != -100
    output = model(**inputs)
    z_BTV = output.logits[:, :-1] / 0.7
    log_p = z_BTV.log_softmax(-1)
    log_prob = log_p.gather(-1, labels.clamp_min(0)[..., None])[..., 0] * counted
    aux_loss = output.get("aux_loss")
    loss = -log_prob.sum() / counted.sum()
    if aux_loss is not None:
        loss = loss + model.config.router_aux_loss_coef * aux_loss
    return {
        "log_probs": log_prob,
        "entropy": -(log_p.exp() * log_p).sum(-1) * counted,
        "mean_logits": z_BTV.mean(-1) * counted,
        "is_top1": (log_p.argmax(-1) == labels) & counted,
        "loss": loss,
        "aux_loss": aux_loss,
    }


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_fields_and_gradients(name, training):
    kind, options = MODELS[name]
    model = build(kind, **options).train(training)
    exact, exact_gradients, exact_top = fields_and_gradients(copy.deepcopy(model).double(), exactly)
    add_fused_lm_head(model, temperature=0.7, outputs=(*FIELDS, "is_top1"))
    eager, eager_gradients, _ = fields_and_gradients(model, asked)
    arguments = trl.DPOConfig(use_cpu=True, bf16=False)
    arguments.temperature = 0.7
    forward = Forward(model, arguments)
    found, gradients, top = fields_and_gradients(model, asked)
    assert forward.deferral.materialized == {}
    assert torch.equal(top, exact_top)
    for each, ours in found.items():
        size = 8 * norm(ours) if each == "loss" else None
        within_eager(ours, eager[each], exact[each], torch.float32, size=size)
    whole = sum(norm(each) ** 2 for each in exact_gradients.values()) ** 0.5
    assert gradients.keys() == exact_gradients.keys()
    for each, ours in gradients.items():
        within_eager(ours, eager_gradients[each], exact_gradients[each], torch.float32, size=whole)
    forward.undo()
    assert type(model.get_output_embeddings()) is torch.nn.Linear
    assert not isinstance(vars(model)["forward"], Forward)


@pytest.mark.parametrize("kind", ["GPT2LMHeadModel", "LlamaForCausalLM"])
def test_generation(kind):
    """`generate` counts positions after the padding, and makes logits of one token at a time."""
    model = build(kind, pad_token_id=0).eval()
    add_fused_lm_head(model)
    tokens = batch()["input_ids"]
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    inputs = {"input_ids": tokens * mask, "attention_mask": mask}
    shapes = []
    model.get_output_embeddings().register_forward_hook(lambda *call: shapes.append(call[-1].shape))

    def logits():
        options = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
        return torch.stack(model.generate(**inputs, max_new_tokens=5, eos_token_id=None, **options).logits)

    expected = logits()
    forward = Forward(model, trl.GRPOConfig(use_cpu=True, bf16=False))
    assert torch.equal(logits(), expected)
    assert shapes == [(len(tokens), 1, V)] * 10
    forward.undo()


def test_copies():
    """A copy has TRL's forward and its own weights; a pickle is the plain model, as without us."""
    model = build("LlamaForCausalLM")
    add_fused_lm_head(model)
    expected = asked(model).log_probs
    forward = Forward(model, trl.SFTConfig(use_cpu=True, bf16=False))
    copied = copy.deepcopy(model)
    assert type(copied.lm_head) is torch.nn.Linear
    torch.testing.assert_close(asked(copied).log_probs, expected)
    with torch.no_grad():
        copied.lm_head.weight.zero_()
    found = asked(copied).log_probs
    torch.testing.assert_close(found, torch.where(expected == 0, 0.0, -torch.tensor(V).log()))
    loaded = pickle.loads(pickle.dumps(model))
    assert type(loaded.lm_head) is torch.nn.Linear
    assert torch.equal(loaded(**batch()).logits, copy.deepcopy(loaded)(**batch()).logits)
    assert forward.deferral.fused == 0
    torch.testing.assert_close(asked(model).log_probs, expected)
    forward.undo()


def words():
    names = ["<pad>", "<s>", "</s>", *(f"w{number}" for number in range(V - 3))]
    model = tokenizers.models.WordLevel({name: place for place, name in enumerate(names)}, "<pad>")
    own = tokenizers.Tokenizer(model)
    own.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=own, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def texts(count):
    return [
        " ".join(f"w{random.randrange(V - 3)}" for _ in range(random.randint(4, 9))) for _ in range(count)
    ]


def sft(model, **options):
    data = datasets.Dataset.from_dict({"text": texts(8)})
    return trl.SFTTrainer, {"args": trl.SFTConfig(**options), "train_dataset": data, "eval_dataset": data}


def adapted(model, **options):
    kind, made = sft(model, **options)
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return kind, made | {"peft_config": adapters}


def dpo(model, **options):
    data = {"prompt": [each + " " for each in texts(8)], "chosen": texts(8), "rejected": texts(8)}
    return trl.DPOTrainer, {
        "args": trl.DPOConfig(**options),
        "train_dataset": datasets.Dataset.from_dict(data),
        "ref_model": copy.deepcopy(model),
    }


def grpo(model, **options):
    own = {"num_generations": 4, "max_completion_length": 6, "num_iterations": 2, "temperature": 0.8}
    return trl.GRPOTrainer, {
        "args": trl.GRPOConfig(**options, **own),
        "train_dataset": datasets.Dataset.from_dict({"prompt": texts(8)}),
        "reward_funcs": lambda completion_ids, **_: [sum(ids) / 1000 for ids in completion_ids],
    }


def rloo(model, **options):
    _, made = grpo(model, **options)
    own = {"num_generations": 4, "max_completion_length": 6, "num_iterations": 2, "temperature": 0.8}
    return trl.RLOOTrainer, made | {"args": trl.RLOOConfig(**options, **own, beta=0.0)}


def kto(model, **options):
    data = {"prompt": [each + " " for each in texts(8)], "completion": texts(8), "label": [True, False] * 4}
    return trl.KTOTrainer, {
        "args": trl.KTOConfig(**options),
        "train_dataset": datasets.Dataset.from_dict(data),
        "ref_model": copy.deepcopy(model),
    }


RUNS = {
    "SFT": (sft, {}),
    "SFT, accumulated": (sft, {"gradient_accumulation_steps": 2}),
    "SFT, dft": (sft, {"loss_type": "dft"}),
    "SFT, smoothed": (sft, {"label_smoothing_factor": 0.1}),
    "SFT, evaluated": (sft, {"eval_strategy": "steps", "eval_steps": 2, "prediction_loss_only": True}),
    "SFT, adapters": (adapted, {}),
    "DPO": (dpo, {}),
    "KTO": (kto, {}),
    "GRPO": (grpo, {}),
    "RLOO": (rloo, {}),
}
UNRELATED = ("time", "runtime", "per_second", "flos", "mfu")


def logged(name, deferred, folder, **more):
    """(numbers by name and step, parameters, the callback)"""
    make, options = RUNS[name]
    torch.manual_seed(0)
    random.seed(0)
    model = build("LlamaForCausalLM", pad_token_id=0, bos_token_id=1, eos_token_id=2)
    own = {"output_dir": str(folder), "max_steps": 3, "per_device_train_batch_size": 4, "logging_steps": 1}
    own |= {"report_to": [], "disable_tqdm": True, "use_cpu": True, "save_strategy": "no", "bf16": False}
    own |= {"optim": "sgd", "learning_rate": 0.1, "dataloader_pin_memory": False}
    kind, made = make(model, **own | options | more)
    callback = TRLDeferralCallback(made.get("ref_model"))
    callbacks = [callback] if deferred else []
    trainer = kind(model=model, processing_class=words(), callbacks=callbacks, **made)
    trainer.train()
    numbers = {
        (key, place): value
        for place, entry in enumerate(trainer.state.log_history)
        for key, value in entry.items()
        if not any(each in key for each in UNRELATED)
    }
    return numbers, [each.detach().clone() for each in model.parameters()], callback


@pytest.mark.parametrize("name", all_extended_but(["SFT", "DPO", "GRPO"], RUNS))
def test_run(name, tmp_path):
    expected, parameters, _ = logged(name, False, tmp_path)
    found, own, callback = logged(name, True, tmp_path)
    assert callback.deferral.materialized == {}
    assert found.keys() == expected.keys()
    assert any(key == "loss" for key, _ in found)
    for key, value in found.items():
        torch.testing.assert_close(torch.tensor(value), torch.tensor(expected[key]), msg=str((key, value)))
    for ours, want in zip(own, parameters):
        torch.testing.assert_close(ours, want)


@pytest.mark.parametrize("name", all_extended_but(["DPO"], ["SFT", "DPO", "GRPO"]))
def test_bfloat16(name, tmp_path):
    """No further from the numbers of float32 than TRL's own are."""
    exact, eager, found = (
        torch.tensor(list(logged(name, deferred, tmp_path, bf16=half)[0].values()), dtype=torch.float64)
        for deferred, half in ((False, False), (False, True), (True, True))
    )
    within_eager(found, eager, exact, torch.bfloat16)


def test_refused():
    model = build("LlamaForCausalLM")
    with pytest.raises(ValueError, match="that a trainer of TRL has prepared"):
        TRLDeferralCallback().on_train_begin(trl.SFTConfig(use_cpu=True, bf16=False), None, None, model=model)
    arguments = trl.DPOConfig(use_cpu=True, bf16=False, use_weighting=True)
    with pytest.raises(ValueError, match="cannot take use_weighting=True"):
        TRLDeferralCallback().on_train_begin(arguments, None, None, model=model)
