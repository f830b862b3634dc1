"""Accelerate, mixed precision, a loss of one's own: `python examples/defer_accelerate.py`, on CPU.

Needs accelerate.
"""

import torch
from accelerate import Accelerator
from torch import nn

import lowtide

BATCH, TOKENS, FEATURES, CLASSES = 4, 64, 16, 32000


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, FEATURES)
        self.body = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.GELU(), nn.Linear(FEATURES, FEATURES))
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, tokens):
        return self.head(self.body(self.embedding(tokens)))


def train(deferred):
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    model = Model()
    if deferred:
        lowtide.defer_logits(model)  # before or after prepare
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(100, (2 * BATCH, TOKENS))
    loader = torch.utils.data.DataLoader(tokens, batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    criterion = nn.CrossEntropyLoss()
    for batch in loader:
        with lowtide.peak_memory("cpu") as peak, accelerator.accumulate(model):
            logits = model(batch[:, :-1])
            loss = criterion(logits.transpose(1, 2), batch[:, 1:])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return loss.item(), peak.bytes


if __name__ == "__main__":
    for name, deferred in (("as it is", False), ("deferred", True)):
        loss, peak = train(deferred)
        print(f"{name}: loss {loss:.5f}, peak memory of a step {peak / 2**20:.0f} MiB")
