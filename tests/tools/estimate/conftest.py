import json
from pathlib import Path

import pytest

LLAMA_3_8B = json.loads((Path(__file__).parents[3] / "benchmarks" / "llama-8b" / "config.json").read_text())
TINY_LLAMA = LLAMA_3_8B | {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 8192,
}
TINY_BART = {
    "model_type": "bart",
    "architectures": ["BartForConditionalGeneration"],
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "vocab_size": 8192,
    "dropout": 0.0,
}
VISION = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
TINY_LLAVA = {"model_type": "llava", "text_config": TINY_LLAMA, "vision_config": VISION}
TINY_GPT2 = {
    "model_type": "gpt2",
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "vocab_size": 8192,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


@pytest.fixture(autouse=True)
def _nothing_is_zero_by_luck():
    """Not here, where tensors have no data: filling them takes the time of the rest."""


@pytest.fixture
def config(tmp_path):
    """Writes a config.json as the Hub has them, and says where."""

    def write(content, **changes):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(content | changes))
        return str(path)

    return write
