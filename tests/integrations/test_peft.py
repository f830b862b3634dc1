"""Adapters on the head: trained like the rest, not skipped as by reading `lm_head.weight`."""

import copy

import pytest
import torch

import lowtide
from lowtide.deferred import RealLogitsWarning

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
from tests.integrations.zoo import build, check, step  # noqa: E402

# peft calls what transformers 5.23 has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

ADAPTERS = {
    "LoRA": {"target_modules": ["q_proj", "lm_head"]},
    "LoRA, both with a bias": {"kind": "PhiForCausalLM", "target_modules": ["lm_head"], "lora_bias": True},
    "rank-stabilised": {"target_modules": ["lm_head"], "use_rslora": True, "lora_dropout": 0.0},
    "the body": {"target_modules": ["q_proj", "v_proj"]},
    "head as a whole": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "in float32, as peft has them": {"target_modules": ["lm_head"], "autocast_adapter_dtype": True},
    "DoRA": {"target_modules": ["lm_head"], "use_dora": True},  # vectors between the products and their sum
}


def adapted(dtype=torch.float32, kind="LlamaForCausalLM", autocast_adapter_dtype=False, **options):
    model = build(kind, tie_word_embeddings=False).to(dtype)
    config = peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(model, config, autocast_adapter_dtype=autocast_adapter_dtype)
    for name, each in model.named_parameters():
        if "lora_B" in name:  # lora_B starts at 0
            torch.nn.init.normal_(each, std=0.3)
    return model.train()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ADAPTERS)
def test_loss_and_gradients(name, dtype):
    model = adapted(dtype, **ADAPTERS[name])
    eager, exact = step(model), step(copy.deepcopy(model).double())
    with lowtide.defer_logits(model) as deferral:
        found = step(model)
    assert (deferral.fused, deferral.materialized) == (1, {})
    assert any("lm_head" in each for each in found) or name == "the body"
    check(found, eager, exact, dtype)


def test_deferred_before_adapter():
    """The wrapper is the head then; real logits, and no other numbers."""
    model = build("LlamaForCausalLM", tie_word_embeddings=False)
    deferral = lowtide.defer_logits(model)
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False)
    model = peft.get_peft_model(model, config).train()
    with pytest.warns(RealLogitsWarning, match="__add__"):
        found = step(model)
    deferral.undo()
    expected = step(model)
    for key, ours in found.items():
        torch.testing.assert_close(ours, expected[key])
