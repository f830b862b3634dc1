"""Every example of docs/howto/rl_preference.md runs as it stands, one after the other, and leaves a
loss that can be differentiated."""

import torch

from tests.docs.snippets import DOCS, blocks_of

PAGE = DOCS / "howto" / "rl_preference.md"


def test_docs_examples_run():
    first, *blocks = blocks_of(PAGE)
    names = {}
    exec(first, names)
    assert len(blocks) == 11
    with_loss = 0
    for block in blocks:
        names["loss"] = torch.zeros(())
        exec(block, names)
        if "loss =" not in block:
            continue
        with_loss += 1
        assert names["loss"].isfinite(), block
        assert names["loss"].requires_grad, block
        names["loss"].backward(retain_graph=True)
    assert with_loss == 10
    assert names["hidden"].grad[:, 4:-1].abs().sum() > 0
    assert names["log_scale"].grad != 0


def test_docs_entropy_bonus_without_tokens():
    """The recipe, with nothing that counts."""
    first, *blocks = blocks_of(PAGE)
    names = {}
    exec(first, names)
    names["labels"].fill_(-100)
    for block in blocks:
        if "sampling" in block:
            exec(block, names)
    names["loss"].backward()
    assert names["loss"].item() == 0
    assert torch.equal(names["hidden"].grad, torch.zeros_like(names["hidden"]))
