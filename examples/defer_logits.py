"""A script like nanoGPT's, and the one line more: `python examples/defer_logits.py`, on a CPU.

The model computes its own loss from its own logits, the loop is the one that everybody writes. It
runs twice, as it is and deferred.
"""

import torch
import torch.nn.functional as F
from torch import nn

import lowtide

BATCH, TOKENS, FEATURES, CLASSES, STEPS = 3, 128, 32, 50304, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES)
        self.qkv, self.out = nn.Linear(FEATURES, 3 * FEATURES), nn.Linear(FEATURES, FEATURES)

    def forward(self, x):
        q, k, v = (
            each.unflatten(-1, (4, -1)).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(-2))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(CLASSES, FEATURES), nn.Embedding(TOKENS, FEATURES)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = nn.LayerNorm(FEATURES)
        self.lm_head = nn.Linear(FEATURES, CLASSES, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, tokens, targets=None):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        logits = self.lm_head(self.norm(self.blocks(x)))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


def train(deferred):
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if deferred:
        lowtide.defer_logits(model)  # the one line
    tokens = torch.randint(100, (BATCH, TOKENS + 1))
    for _ in range(STEPS):
        with lowtide.peak_memory("cpu") as peak:
            logits, loss = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
            right = (logits.argmax(-1) == tokens[:, 1:]).sum()
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss.item(), right.item(), peak.bytes


if __name__ == "__main__":
    for name, deferred in (("as it is", False), ("deferred", True)):
        loss, right, peak = train(deferred)
        print(f"{name}: loss {loss:.5f}, {right} tokens right, peak memory of a step {peak / 2**20:.0f} MiB")
