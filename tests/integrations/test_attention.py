"""attn_implementation="lowtide": logits and gradients are those of "eager"."""

import copy

import pytest
import torch
from torch import nn

import lowtide
from lowtide.memory import peak_memory
from tests.deferred.helpers import norm, within_eager

transformers = pytest.importorskip("transformers")
from transformers import masking_utils  # noqa: E402

from lowtide.integrations.transformers import DenseMaskWarning, register_attention  # noqa: E402
from lowtide.integrations.transformers.attention import attention  # noqa: E402
from lowtide.integrations.transformers.bands import Shown, band  # noqa: E402
from lowtide.integrations.transformers.masks import mask as models_mask  # noqa: E402
from tests.integrations.dense import dense_mask, exactly, register_exactly  # noqa: E402
from tests.integrations.inputs import inputs_of  # noqa: E402
from tests.integrations.zoo import B, T, batch, build  # noqa: E402

MODELS = {
    "Llama": ("LlamaForCausalLM", {}),
    "Mistral, sliding": ("MistralForCausalLM", {"sliding_window": 4}),
    "Gemma 2, soft cap": ("Gemma2ForCausalLM", {"attn_logit_softcapping": 0.003}),
    "gpt-oss, sinks": ("GptOssForCausalLM", {}),
    "T5, position bias": ("T5ForConditionalGeneration", {}),
    "BART": ("BartForConditionalGeneration", {}),
    "BERT": ("BertForMaskedLM", {}),
    "ModernBERT, local both ways": ("ModernBertForMaskedLM", {}),
    "Qwen 2": ("Qwen2ForCausalLM", {}),
    "Qwen 3": ("Qwen3ForCausalLM", {}),
    "Llama 4, chunked": ("Llama4ForCausalLM", {"attention_chunk_size": 5}),
}
PADDING = {"none": None, "right": (0, slice(-4, None)), "left": (1, slice(0, 3))}


@pytest.fixture(autouse=True)
def _registered():
    register_attention()
    register_attention()
    register_exactly()


def inputs_with(padding):
    """Labels are of real tokens that follow real tokens."""
    inputs = batch()
    if padding is not None:
        seen = torch.ones(B, T, dtype=torch.long)
        seen[padding] = 0
        after = torch.nn.functional.pad(seen, (1, 0), value=1)[:, :-1]
        inputs |= {"attention_mask": seen, "labels": inputs["labels"].masked_fill(seen * after == 0, -100)}
    return inputs


def found_with(model, implementation, inputs):
    """Logits (where a token is), loss and the gradients, by name."""
    model.set_attn_implementation(implementation)
    model.zero_grad(set_to_none=True)
    output = model(**inputs)
    output.loss.backward()
    logits = output.logits.detach()
    seen = inputs.get("attention_mask")
    if seen is not None and seen.dim() == 2 and not model.config.is_encoder_decoder:
        logits = logits[seen.bool()]
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return {"logits": logits, "loss": output.loss.detach(), **gradients}


def check(model, inputs):
    dtype = model.dtype
    eager = found_with(model, "eager", inputs)
    exact = found_with(copy.deepcopy(model).double(), "exactly", inputs)
    found = found_with(model, "lowtide", inputs)
    assert found.keys() == eager.keys()
    whole = sum(norm(each) ** 2 for name, each in exact.items() if name not in ("loss", "logits")) ** 0.5
    for name, ours in found.items():
        size = {"logits": norm(exact["logits"]), "loss": 8 * norm(ours)}.get(name, whole)
        within_eager(ours, eager[name], exact[name], dtype, size=size)


def learned_numbers(model):
    """What starts at 0 or near it shows nothing: sinks and biases by distance."""
    generator = torch.Generator().manual_seed(4)
    for name, each in model.named_parameters():
        if "sink" in name or "relative_attention_bias" in name:
            each.data = torch.randn(each.shape, generator=generator).to(each)
    return model


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore::lowtide.integrations.transformers.DenseMaskWarning")
def test_logits_and_gradients(name, padding):
    kind, options = MODELS[name]
    check(learned_numbers(build(kind, **options)), inputs_with(PADDING[padding]))


@pytest.mark.parametrize(
    "name", ["Mistral, sliding", "Gemma 2, soft cap", "gpt-oss, sinks", "T5, position bias"]
)
def test_bfloat16(name):
    kind, options = MODELS[name]
    check(learned_numbers(build(kind, **options)).bfloat16(), inputs_with(PADDING["right"]))


@pytest.mark.parametrize("name", ["Llama", "Mistral, sliding"])
def test_packed_sequences(name):
    """As lengths, without a mask."""
    kind, options = MODELS[name]
    places = [[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6], [0, 1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0]]
    check(build(kind, **options), batch() | {"position_ids": torch.tensor(places)})


def test_mask_of_caller():
    model, dense = build("LlamaForCausalLM"), torch.rand(B, 1, T, T) < 0.5
    dense = dense | torch.eye(T, dtype=torch.bool)
    bias = torch.zeros(B, 1, T, T).masked_fill(~dense, -torch.inf)
    expected = found_with(model, "eager", batch() | {"attention_mask": bias})
    for own in (bias, dense):
        found = found_with(model, "lowtide", batch() | {"attention_mask": own})
        for name, ours in found.items():
            torch.testing.assert_close(ours, expected[name])


def test_mask_materialized_is_named():
    kind, options = MODELS["Llama 4, chunked"]
    with pytest.warns(DenseMaskWarning, match=r"\[2, 1, 12, 12\] bool"):
        found_with(build(kind, **options), "lowtide", inputs_with(PADDING["left"]))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize(
    "name", ["Llama", "Mistral, sliding", "Gemma 2, soft cap", "gpt-oss, sinks", "T5, position bias"]
)
def test_generation(name, cache):
    """More keys than queries, and padding on the left: the logits of every step."""
    kind, options = MODELS[name]
    model = learned_numbers(build(kind, **options)).eval()
    inputs = inputs_with(PADDING["left"])
    options = {
        "use_cache": True,
        "max_new_tokens": 5,
        "min_new_tokens": 5,
        "do_sample": False,
        "cache_implementation": cache,
    }
    options |= {"output_logits": True, "return_dict_in_generate": True, "disable_compile": True}

    def generated(model, implementation):
        model.set_attn_implementation(implementation)
        found = model.generate(inputs["input_ids"], attention_mask=inputs["attention_mask"], **options)
        assert found.past_key_values is not None
        return found.sequences, torch.stack(found.logits)

    tokens, eager = generated(model, "eager")
    exact_tokens, exact = generated(copy.deepcopy(model).double(), "exactly")
    found_tokens, found = generated(model, "lowtide")
    assert torch.equal(found_tokens, tokens)
    assert torch.equal(exact_tokens, tokens)
    within_eager(found, eager, exact, torch.float32)


def test_dropout_in_training_only():
    query, key, value = torch.randn(3, 2, 4, 9, 8)
    module = nn.Module()
    torch.manual_seed(3)
    out, _ = attention(module, query, key, value, None, dropout=0.5, is_causal=False)
    torch.manual_seed(3)
    own = [each.transpose(1, 2) for each in (query, key, value)]
    expected = lowtide.memory_efficient_attention(*own, p=0.5)
    assert torch.equal(out, expected)
    plain, _ = attention(module.eval(), query, key, value, None, dropout=0.5, is_causal=False)
    assert torch.equal(plain, lowtide.memory_efficient_attention(*own))
    assert not torch.equal(out, plain)


def test_sinks_and_bias_per_query():
    """As Inkling 2 has them."""
    query, key, value = (torch.randn(B, heads, T, 8, dtype=torch.float64) for heads in (4, 2, 2))
    bias, sinks = (torch.randn(B, 4, T, width, dtype=torch.float64) for width in (T, 1))
    leaves = [each.requires_grad_() for each in (query, key, value, bias, sinks)]
    options = {"batch_size": B, "q_length": T, "kv_length": T}
    options |= {"mask_function": masking_utils.sliding_window_causal_mask_function(5)}
    options["attention_mask"] = inputs_with(PADDING["left"])["attention_mask"].bool()
    upstream = torch.randn(B, T, 4, 8, dtype=torch.float64) * options["attention_mask"][..., None, None]
    found, expected = (
        (out, *torch.autograd.grad(out, leaves, upstream))
        for out in (
            function(nn.Module(), query, key, value, mask(**options), position_bias=bias, sinks=sinks)[0]
            for function, mask in ((attention, models_mask), (exactly, dense_mask))
        )
    )
    seen = options["attention_mask"]
    for ours, want in zip((found[0][seen], *found[1:]), (expected[0][seen], *expected[1:])):
        torch.testing.assert_close(ours, want)


@pytest.mark.extended
def test_compile_one_graph():
    model, inputs = build("MistralForCausalLM", num_hidden_layers=1), inputs_with(PADDING["right"])
    expected = found_with(model, "lowtide", inputs)
    model.zero_grad(set_to_none=True)
    torch._dynamo.reset()
    loss = torch.compile(model, fullgraph=True, backend="aot_eager")(**inputs).loss
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected["loss"])
    for name, each in model.named_parameters():
        torch.testing.assert_close(each.grad, expected[name])


def test_memory_without_scores_and_mask():
    """By the allocator: nothing of M x N, not even bits, with a window, padding and soft cap."""
    length = 2048
    model = build("Gemma2ForCausalLM", max_position_embeddings=length, vocab_size=16)
    tokens = torch.randint(3, 16, (1, length))
    seen = torch.ones(1, length, dtype=torch.long)
    seen[:, -7:] = 0
    model.set_attn_implementation("lowtide")
    with peak_memory("cpu") as peak:
        model(input_ids=tokens, attention_mask=seen, labels=tokens).loss.backward()
    assert peak.largest < length * length / 2


def test_bands():
    i, j = torch.arange(9)[:, None], torch.arange(11)
    functions = [
        masking_utils.causal_mask_function,
        masking_utils.bidirectional_mask_function,
        masking_utils.sliding_window_causal_mask_function(3),
        masking_utils.sliding_window_bidirectional_mask_function(2),
        lambda b, h, q, k: (k < q + 2) & (q - k < 4),
        lambda b, h, q, k: abs(k - q) < 3,
    ]
    for function in functions:
        shown = band(function)
        left, right = (20 if side is None else side for side in (shown.left, shown.right))
        expected = function(None, None, i, j) & torch.ones(9, 11, dtype=torch.bool)
        assert torch.equal((j - i >= -left) & (j - i <= right), expected)
    assert band(functions[1]) == Shown()
    others = [
        masking_utils.chunked_causal_mask_function(3, torch.zeros(1, dtype=torch.long)),
        masking_utils.packed_sequence_mask_function(torch.zeros(1, 9)),
        masking_utils.or_masks(functions[0], functions[3]),
        lambda b, h, q, k: k + q <= 5,
        lambda b, h, q, k: k >= 3,
        lambda b, h, q, k: (k <= q) and (q - k < 3),
        lambda b, h, q, k: not k > q,
        lambda b, h, q, k: k == q,
        lambda b, h, q, k: (k <= q) if q != 0 else (k < 1),
        lambda b, h, q, k: True,
    ]
    assert [band(function) for function in others] == [None] * len(others)


PARTS = [(slice(-1, None), slice(None)), (slice(2, 7), slice(9)), (slice(None), slice(0, 5))]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("window", [None, 4])
def test_mask_slice(part, window):
    """As Gemma 4 takes the last queries, and others the keys that there are."""
    seen = inputs_with(PADDING["left"])["attention_mask"].bool()
    function = masking_utils.causal_mask_function
    if window is not None:
        function = masking_utils.sliding_window_causal_mask_function(window)
    options = {"batch_size": B, "q_length": T, "kv_length": T, "mask_function": function}
    mask = models_mask(**options, attention_mask=seen)
    part = (slice(None), slice(None), *part)
    expected = dense_mask(**options, attention_mask=seen)[part]
    found = mask[part].materialize(expected.shape)
    assert torch.equal(found == 0, expected)
    for other in (0, (slice(None), 0), (..., slice(3)), (slice(None),) * 3 + (slice(1, None),)):
        with pytest.raises(ValueError, match="takes a part of its mask"):
            mask[other]


REFUSED = {
    "DogeForCausalLM": "this model asks its mask for its dtype",
    "BigBirdPegasusForConditionalGeneration": r"computes (__r?add__|add) of its mask",
    "GitForCausalLM": r"computes (__r?add__|add) of its mask",
    "DeepseekV4ForCausalLM": "this layer has 12 queries and 15 keys, its mask was made for 12 and 12",
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.filterwarnings("ignore::lowtide.integrations.transformers.DenseMaskWarning")
def test_mask_computed_by_model(kind):
    model = build(kind)
    model.set_attn_implementation("lowtide")
    with pytest.raises((ValueError, AttributeError), match=f"{REFUSED[kind]}.*use 'sdpa' or 'eager'"):
        model(**inputs_of(model)[1])


def test_refused(monkeypatch):
    model = build("LlamaForCausalLM")
    model.set_attn_implementation("lowtide")
    with pytest.raises(ValueError, match=r"cannot take output_attentions.*attn_implementation='eager'"):
        model(**batch(), output_attentions=True)
    query = torch.randn(2, 4, 9, 8)
    with pytest.raises(ValueError, match="cannot take cache"):
        attention(model, query, query, query, None, cache=object())
    with pytest.raises(ValueError, match="cannot take block_indices"):
        attention(model, query, query, query, None, block_indices=torch.zeros(2, 1, 9, 1, dtype=torch.long))
    monkeypatch.setattr("lowtide.integrations.transformers.attention.sdpa_mask", lambda cache_position: None)
    with pytest.raises(ImportError, match=f"transformers {transformers.__version__}; upgrade it"):
        register_attention()


def test_soft_cap_with_position_bias_refused():
    query = torch.randn(1, 2, 5, 4)
    with pytest.raises(ValueError, match="soft cap beside a position bias"):
        attention(nn.Module(), query, query, query, None, softcap=5.0, position_bias=torch.zeros(1, 2, 5, 5))
