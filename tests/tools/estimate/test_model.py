import json

import pytest
import torch

from lowtide.tools.errors import UserError
from lowtide.tools.estimate.model import build, departures
from lowtide.tools.estimate.setting import Setting
from tests.tools.estimate.conftest import TINY_BART, TINY_LLAMA, TINY_LLAVA


def test_departures_from_the_config_are_told(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY_LLAMA | {"architectures": ["LlamaForCausalLM"]}))
    assert departures(str(config)) == []
    other = {"quantization_config": {"load_in_4bit": True}, "architectures": ["LlamaForTokenClassification"]}
    config.write_text(json.dumps(TINY_LLAMA | other))
    quantized, classifier = departures(str(tmp_path))
    assert quantized == f"{config}: quantization_config is left out; the estimate trains weights of --dtype"
    assert classifier == f"{config}: the estimate is of LlamaForCausalLM, not of LlamaForTokenClassification"
    for named in ([1], 1, "LlamaForCausalLM", None):
        config.write_text(json.dumps(TINY_LLAMA | {"architectures": named}))
        assert departures(str(config)) == []


BERT = {"model_type": "bert", "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("content", "named", "built"),
    [
        (TINY_BART, "BartForConditionalGeneration", "BartForConditionalGeneration"),
        (TINY_BART, "BartForCausalLM", "BartForCausalLM"),
        (TINY_BART, None, "BartForCausalLM"),
        (BERT, "BertForMaskedLM", "BertForMaskedLM"),
        (BERT, "BertModel", "BertLMHeadModel"),
        (TINY_LLAVA, "LlavaForConditionalGeneration", "LlavaForConditionalGeneration"),
        ({"model_type": "t5"}, None, "T5ForConditionalGeneration"),
        ({"model_type": "modernbert"}, None, "ModernBertForMaskedLM"),
    ],
)
def test_model_that_the_config_names(tmp_path, content, named, built):
    pytest.importorskip("transformers")
    config = tmp_path / "config.json"
    config.write_text(json.dumps(content | {"architectures": named and [named]}))
    setting = Setting(str(config), 1, 16)
    with torch.device("meta"):
        assert type(build(setting).module).__name__ == built
    of_another = f"{config}: the estimate is of {built}, not of {named}"
    of_text = f"{config}: the sequences of the estimate are text, without images or speech"
    expected = [of_another] * (named not in (None, built)) + [of_text] * (content is TINY_LLAVA)
    assert departures(str(config)) == expected


def test_first_cause_of_a_failed_import_is_told(tmp_path, monkeypatch):
    """Transformers raises errors about a model from those about its parts, down to the import."""
    transformers = pytest.importorskip("transformers")

    def fail(*_, **__):
        try:
            try:
                raise ModuleNotFoundError("No module named 'flash'")
            except ModuleNotFoundError as missing:
                raise RuntimeError("could not import its layers") from missing
        except RuntimeError as part:
            raise ImportError("could not import Llama") from part

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_config", fail)
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    with pytest.raises(
        UserError, match=r"builds no llama .*\(ModuleNotFoundError: No module named 'flash'\)"
    ):
        build(Setting(str(tmp_path), 1, 64))
