"""What the pages say of Transformers in numbers: counted in the generated table or measured."""

import re
from pathlib import Path

import pytest
import torch

from lowtide.integrations.transformers import register_attention
from lowtide.memory import peak_memory
from tests.support.extended import all_extended_but

transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "models.md").read_text()


def test_page_model_counts():
    rows = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if re.match(r"\| \w+ \| ", line)]
    rows = [row for row in rows if "real" in row]  # rows of the models that were built
    fused = sum("fused" in row for row in rows)
    attending = sum(any(cell.startswith("yes") for cell in row) for row in rows)
    assert f"{fused} of {len(rows)} models are fused" in PAGE
    assert f"{attending} have lowtide's attention" in PAGE
    readme, *pages = (
        (ROOT / name).read_text()
        for name in ("README.md", "docs/howto/transformers.md", "docs/start/any_model.md")
    )
    assert f"{fused} of {len(rows)} architectures of Transformers train so unchanged" in readme
    assert f"{attending} of {len(rows)} architectures of Transformers take" in readme
    assert all(f"{fused} of the {len(rows)} language models" in page for page in pages)


SIZES = {
    "vocab_size": 256,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "sliding_window": 512,
}
MODELS = {
    "Gemma 2": lambda: transformers.Gemma2Config(**SIZES, intermediate_size=512),
    "gpt-oss": lambda: transformers.GptOssConfig(**SIZES, intermediate_size=256, num_local_experts=4),
}


@pytest.mark.parametrize("name", all_extended_but([], MODELS))
def test_page_attention_memory(name):
    register_attention()
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name](), attn_implementation="eager")
    tokens = torch.randint(3, 256, (1, 2048))
    seen = torch.ones_like(tokens)
    seen[:, -100:] = 0
    labels = tokens.masked_fill(seen == 0, -100)
    row = re.search(rf"\| {name} .*? \| (\d+) MiB \| (\d+) MiB \| (\d+) MiB \| (\d+) MiB \|", PAGE)
    told = [int(each) * 2**20 for each in row.groups()]
    for implementation, peak, largest in zip(("eager", "lowtide"), told[:2], told[2:]):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        with peak_memory("cpu") as found:
            model(input_ids=tokens, attention_mask=seen, labels=labels).loss.backward()
        # A tenth, for other versions of torch and transformers.
        assert (found.bytes, found.largest) == pytest.approx((peak, largest), rel=0.1)
