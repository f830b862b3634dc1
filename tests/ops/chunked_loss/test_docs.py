"""Every block of docs/howto/own_loss.md runs as it stands, in order, and prints what it says."""

import re

import torch

from tests.docs.snippets import DOCS, blocks_of, forget, run

PAGE = DOCS / "howto" / "own_loss.md"


def test_docs_blocks_run(device):
    names = {}
    first, *blocks = blocks_of(PAGE)
    with torch.device(device):
        run(first, names)
        for number, block in enumerate(blocks, 2):
            printed = run(block, names, f"block {number}")
            assert bool(printed) == bool(re.findall(r"print\(\w+\)  # .", block))
            new_loss = re.search(r"^loss = ", block, re.MULTILINE)
            if new_loss and "backward()" not in block and "grad(" not in block:
                names["loss"].backward(retain_graph=True)
    assert len(blocks) == 16
    B, V, D = 2, *names["head"].weight.shape
    assert names["hidden"].device.type == device
    assert names["gradients"]["weight"].shape == (B, V, D)
    assert names["temperature"].grad.isfinite()
    assert 0 <= names["accuracy"] <= 1


def test_docs_fsdp_block_leaves_gradients():
    """The page of several devices has the block that this page had; here is what it leaves."""
    names = {}
    blocks = blocks_of(DOCS / "howto" / "distributed.md")
    try:
        run(blocks[0], names)
        (sharded,) = (
            block for block in blocks if "fully_shard(model.lm_head)" in block and "chunked_loss" in block
        )
        run(sharded, names)
    finally:
        torch.distributed.destroy_process_group()
    assert names["model"].lm_head.weight.grad.full_tensor().isfinite().all()
    forget(names)
