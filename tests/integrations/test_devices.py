"""Models of Transformers on the CPU and on a card, larger than elsewhere: with heads that kernels
are made for, and with more logits than the default workspace holds.

Shapes: B sequences, T tokens, V vocabulary; N tokens of them all.
"""

import copy

import pytest
import torch

import lowtide
from lowtide.memory import peak_memory
from tests.conftest import NEEDS_CUDA

pytest.importorskip("transformers")
from tests.integrations import test_attention
from tests.integrations.test_attention import _registered, learned_numbers  # noqa: F401
from tests.integrations.zoo import build, check


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_window_soft_cap_grouped_heads(device, dtype, padding):
    """Of Gemma 2: logits and gradients are eager's, within its own error."""
    B, T, V = 2, 300, 512
    sizes = {"hidden_size": 128, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"vocab_size": V, "max_position_embeddings": T, "sliding_window": 100}
    scores = {"initializer_range": 0.15, "attn_logit_softcapping": 2.0}  # their standard deviation is 1.4
    model = build("Gemma2ForCausalLM", **sizes, **scores)
    model = learned_numbers(model).to(device, dtype)
    tokens = torch.randint(3, V, (B, T), device=device)
    inputs = {"input_ids": tokens, "labels": tokens.clone()}
    if padding:
        inputs["attention_mask"] = torch.ones_like(tokens)
        inputs["attention_mask"][0, -70:] = 0
        inputs["labels"][0, -70:] = -100
    test_attention.check(model, inputs)


@pytest.mark.gpu
@NEEDS_CUDA
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gpt-oss, sinks", "T5, position bias"])
def test_attention_sinks_and_position_bias(dtype, name):
    """With the gradients of both; on the CPU that is test_attention.py's."""
    kind, options = test_attention.MODELS[name]
    model = learned_numbers(build(kind, **options)).to("cuda", dtype)
    inputs = test_attention.inputs_with(test_attention.PADDING["right"])
    test_attention.check(model, {name: each.cuda() for name, each in inputs.items()})


def trainers_step(model, tokens, autocast=True):
    """As Trainer makes it: loss and gradients of accumulated batches, over all their tokens."""
    model.zero_grad(set_to_none=True)
    items = torch.tensor(tokens[:, :, 1:].numel(), device=tokens.device)
    total = torch.zeros((), device=tokens.device, dtype=torch.float64)
    for batch in tokens:
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=autocast):
            loss = model(input_ids=batch, labels=batch, num_items_in_batch=items).loss
        loss.backward()
        total += loss.detach()
    return {"loss": total, **{name: each.grad for name, each in model.named_parameters()}}


def test_trainer_step_autocast(device):
    V = 2048
    model = build("LlamaForCausalLM", vocab_size=V, hidden_size=128, head_dim=32).to(device)
    tokens = torch.randint(V, (2, 2, 48), device=device)
    exact = trainers_step(copy.deepcopy(model).double(), tokens, autocast=False)
    eager = trainers_step(model, tokens)
    with lowtide.defer_logits(model) as deferral:
        found = trainers_step(model, tokens)
    assert (deferral.fused, deferral.materialized) == (2, {})
    check(found, eager, exact, torch.bfloat16)


@pytest.mark.gpu
@NEEDS_CUDA
def test_step_peak_lower_by_logits():
    step_without_logits("cuda", B=16, T=512, V=65_536)  # 2 GiB in float32, twice the default workspace


def step_without_logits(device, B, T, V):
    model = build("LlamaForCausalLM", vocab_size=V).to(device)
    tokens = torch.randint(V, (1, B, T), device=device)
    peaks = []
    for deferred in (False, True):
        deferral = lowtide.defer_logits(model) if deferred else None
        trainers_step(model, tokens)  # compiles
        model.zero_grad(set_to_none=True)
        with peak_memory(device) as peak:
            trainers_step(model, tokens)
        peaks.append(peak)
    deferral.undo()
    eager, ours = peaks
    logits = B * T * V
    assert ours.largest < 2 * logits <= eager.largest  # eager's logits are in bfloat16
    assert eager.bytes - ours.bytes > 4 * logits
