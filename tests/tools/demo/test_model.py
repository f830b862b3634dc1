import math

import pytest
import torch

from lowtide.tools.demo.config import HEAD_WIDTH
from lowtide.tools.demo.model import GPT, generate, rotary_table, rotate
from lowtide.tools.eager import eager_loss


@pytest.fixture
def model():
    gpt = GPT(vocab_size=300, width=64, depth=2, tied=False)
    for parameter in gpt.parameters():  # blocks start as the identity, which would hide what they do
        torch.nn.init.normal_(parameter, std=0.1)
    return gpt


def test_attention_is_causal(model):
    tokens = torch.randint(300, (2, 24))
    changed = tokens.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 300
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert (before[:, 10:] - after[:, 10:]).abs().amax(dim=-1).min() > 1e-4


def test_rotary_scores_by_distance_alone():
    query, key = torch.randn(HEAD_WIDTH), torch.randn(HEAD_WIDTH)
    rotary = rotary_table(40, torch.device("cpu"))
    queries, keys = rotate(query.expand(40, -1), rotary), rotate(key.expand(40, -1), rotary)
    scores = queries @ keys.T
    torch.testing.assert_close(scores[5, 2], scores[35, 32], rtol=1e-4, atol=1e-4)
    assert (scores[5, 2] - scores[5, 3]).abs() > 1e-2
    torch.testing.assert_close(queries.norm(dim=-1), query.norm().expand(40))


def test_fresh_model_is_uniform():
    model = GPT(vocab_size=1000, width=64, depth=2, tied=False)
    tokens, targets = torch.randint(1000, (2, 4, 64))
    loss = eager_loss(model(tokens), model.head.weight, targets)
    assert loss.item() == pytest.approx(math.log(1000), abs=0.1)


def test_tied_head_is_embedding():
    tied = GPT(vocab_size=300, width=64, depth=1, tied=True)
    untied = GPT(vocab_size=300, width=64, depth=1, tied=False)
    assert tied.head.weight is tied.embedding.weight
    sizes = [sum(parameter.numel() for parameter in model.parameters()) for model in (tied, untied)]
    assert sizes[1] - sizes[0] == 300 * 64


def test_generation_repeats_with_seed(model):
    texts = [generate(model, [1, 2, 3], 20, context=8, seed=seed) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert len(texts[0]) == 23
    assert texts[0][:3] == [1, 2, 3]
