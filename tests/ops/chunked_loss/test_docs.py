"""Every block of docs/howto/own_loss.md runs as it stands, one after the other, and prints what it says."""

import re
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

import lowtide

PAGE = Path(__file__).parents[3] / "docs" / "howto" / "own_loss.md"
B, T, D, V = 2, 40, 8, 21


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.lm_head = nn.Embedding(V, D), nn.Linear(D, V, bias=False)

    def forward(self, tokens):
        return self.embedding(tokens).tanh()


def taken_for_granted(device):
    model = Model().to(device)
    tokens, labels = torch.randint(V, (2, B, T), device=device)
    labels[:, ::7] = -100
    return {
        **{"torch": torch, "F": F, "partial": partial, "lowtide": lowtide, "fully_shard": fully_shard},
        **{
            "model": model,
            "head": model.lm_head,
            "hidden": model(tokens),
            "tokens": tokens,
            "labels": labels,
        },
        "lengths": torch.tensor([T, T // 2], device=device),
    }


def test_docs_blocks_run(device, capsys, tmp_path):
    names = taken_for_granted(device)
    *blocks, sharded = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for block in blocks:
        if "hidden = " not in block:
            names["hidden"] = names["model"](names["tokens"])
        exec(block, names)
        printed = capsys.readouterr().out
        promised = re.findall(r"print\(\w+\)  # (.*)", block)
        assert bool(printed) == bool(promised)
        assert all(each.strip(" .") in printed for each in promised)
        if re.search(r"^loss = ", block, re.MULTILINE) and "backward()" not in block and "grad(" not in block:
            names["loss"].backward()
    assert len(blocks) == 14
    assert names["gradients"]["weight"].shape == (B, V, D)
    assert names["temperature"].grad.isfinite()
    assert 0 <= names["accuracy"] <= 1

    if device == "cuda":
        return  # gloo's part is the CPU's
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        names["model"].zero_grad()
        exec(sharded, names)
    finally:
        dist.destroy_process_group()
    assert names["model"].lm_head.weight.grad.full_tensor().isfinite().all()
