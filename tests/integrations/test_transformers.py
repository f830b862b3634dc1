"""Transformers' own models, unmodified: loss and every gradient are those without a deferral."""

import copy

import pytest
import torch

import lowtide
from lowtide.memory import peak_memory

transformers = pytest.importorskip("transformers")
from tests.integrations.zoo import B, V, batch, build, check, step  # noqa: E402

MODELS = {
    "Llama": ("LlamaForCausalLM", {"tie_word_embeddings": False}),
    "Llama, tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "Gemma": ("GemmaForCausalLM", {}),
    "Gemma 2": ("Gemma2ForCausalLM", {}),
    "Gemma 3": ("Gemma3ForCausalLM", {}),
    "Gemma 3, capped": ("Gemma3ForCausalLM", {"final_logit_softcapping": 5.0}),
    "Qwen 2": ("Qwen2ForCausalLM", {}),
    "Qwen 2 MoE": ("Qwen2MoeForCausalLM", {"output_router_logits": True}),
    "Qwen 3": ("Qwen3ForCausalLM", {}),
    "Qwen 3 MoE": ("Qwen3MoeForCausalLM", {"output_router_logits": True}),
    "Mistral": ("MistralForCausalLM", {}),
    "Mixtral": ("MixtralForCausalLM", {"output_router_logits": True}),
    "Granite": ("GraniteForCausalLM", {"logits_scaling": 3.0}),
    "Cohere": ("CohereForCausalLM", {}),
    "Cohere 2": ("Cohere2ForCausalLM", {}),
    "Phi": ("PhiForCausalLM", {}),
    "GPT-2": ("GPT2LMHeadModel", {}),
    "OPT": ("OPTForCausalLM", {}),
    "GPT-NeoX": ("GPTNeoXForCausalLM", {}),
    "GPT-J": ("GPTJForCausalLM", {}),
    "Bloom": ("BloomForCausalLM", {}),
    "Falcon": ("FalconForCausalLM", {}),
    "MPT": ("MptForCausalLM", {}),
    "Mamba": ("MambaForCausalLM", {}),
    "gpt-oss": ("GptOssForCausalLM", {}),
    "T5": ("T5ForConditionalGeneration", {}),
    "BART": ("BartForConditionalGeneration", {}),
    "BART decoder": ("BartForCausalLM", {}),
    "BERT": ("BertForMaskedLM", {}),
    "BERT decoder": ("BertLMHeadModel", {}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients(name, dtype):
    kind, options = MODELS[name]
    model = build(kind, **options).to(dtype)
    eager, exact = step(model), step(copy.deepcopy(model).double())
    with lowtide.defer_logits(model) as deferral:
        found = step(model)
    assert (deferral.fused, deferral.materialized) == (1, {})
    check(found, eager, exact, dtype)


def test_model_multiplying_by_itself_refused():
    """FSMT's output embedding is an nn.Embedding whose weight its decoder takes."""
    with pytest.raises(ValueError, match="Embedding is no linear head"):
        lowtide.defer_logits(build("FSMTForConditionalGeneration"))


def test_evaluation_and_generation_materialize():
    model = build("LlamaForCausalLM").eval()
    inputs = batch()
    expected = model(**inputs)
    text = model.generate(inputs["input_ids"], max_new_tokens=5, do_sample=False)
    with lowtide.defer_logits(model):
        found = model(**inputs)
        assert torch.equal(found.logits, expected.logits)
        assert torch.equal(found.loss, expected.loss)
        assert torch.equal(model.generate(inputs["input_ids"], max_new_tokens=5, do_sample=False), text)


def test_generation_in_training_mode():
    """As loops do that generate between two steps: the same text."""
    model = build("LlamaForCausalLM")
    tokens = batch()["input_ids"]
    text = model.generate(tokens, max_new_tokens=5, do_sample=False)
    with lowtide.defer_logits(model) as deferral:
        found = model.generate(tokens, max_new_tokens=5, do_sample=False)
    assert torch.equal(found, text)
    assert deferral.materialized == {}


def test_output_shape():
    model = build("LlamaForCausalLM")
    lowtide.defer_logits(model)
    inputs = batch()
    output = model(**inputs)
    assert output.logits.shape == (*inputs["input_ids"].shape, V)
    assert output[1] is output.logits
    assert model(inputs["input_ids"], logits_to_keep=1).logits.shape == (B, 1, V)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    model = build("LlamaForCausalLM")
    expected = step(model)
    new = getattr(model, "activation_checkpointing_enable", None)  # transformers 5.23
    (new or model.gradient_checkpointing_enable)({"use_reentrant": reentrant})
    with lowtide.defer_logits(model) as deferral:
        found = step(model)
    assert (deferral.fused, deferral.materialized) == (1, {})
    for name, each in found.items():
        torch.testing.assert_close(each, expected[name])


def test_saving(tmp_path):
    model = build("LlamaForCausalLM", tie_word_embeddings=True)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    with lowtide.defer_logits(model):
        model.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert type(loaded.lm_head) is torch.nn.Linear
    assert loaded.config.architectures == ["LlamaForCausalLM"]
    assert loaded.state_dict().keys() == before.keys()
    for name, each in loaded.state_dict().items():
        assert torch.equal(each, before[name])


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "Gemma2ForCausalLM"])
def test_compile_one_graph(kind):
    model = build(kind)
    expected = step(model)
    torch._dynamo.reset()
    with lowtide.defer_logits(model):
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        model.zero_grad()
        loss = compiled(**batch()).loss
        loss.backward()
    torch.testing.assert_close(loss.detach(), expected["loss"])
    for name, each in model.named_parameters():
        torch.testing.assert_close(each.grad, expected[name])


def test_memory_without_logits():
    """By the allocator: nothing of N x V, with more logits than the default 64 MiB hold."""
    classes = 1 << 16
    model = build("LlamaForCausalLM", vocab_size=classes)
    tokens = torch.randint(classes, (8, 64))
    with lowtide.defer_logits(model), peak_memory("cpu") as peak:
        model(input_ids=tokens, labels=tokens).loss.backward()
    logits = tokens.numel() * classes * 4
    assert peak.largest < logits
    model.zero_grad()
    with peak_memory("cpu") as dense:
        model(input_ids=tokens, labels=tokens).loss.backward()
    assert dense.largest >= logits
    assert dense.bytes > 2 * peak.bytes
