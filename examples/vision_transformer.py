"""Train a vision transformer with relative-position bias: `python examples/vision_transformer.py`.

It says which way the stripes of an image run, under noise. It has no positional embedding: where a
patch is, it knows only relative to others, from a bias [1, H, M, N] looked up in a table of the
differences of rows and columns. It is trained twice: with all scores of a layer at once, and with
lowtide, which holds the bias and its gradient, and no scores.
"""

import torch
import torch.nn.functional as F
from torch import nn

import lowtide

IMAGE, PATCH, WIDTH, HEADS, DEPTH = 64, 4, 32, 2, 2
SIDE = IMAGE // PATCH  # patches; M = N = SIDE * SIDE
BATCH, STEPS, TESTED, DIRECTIONS = 8, 40, 64, 6


def draw(count, generator):
    """Images [count, IMAGE, IMAGE] and the directions [count] of their stripes, at random."""
    direction = torch.randint(DIRECTIONS, (count,), generator=generator)
    angle = (torch.pi * direction / DIRECTIONS)[:, None, None]
    place, width = torch.rand(2, count, 1, 1, generator=generator)
    row, column = torch.meshgrid(torch.arange(IMAGE), torch.arange(IMAGE), indexing="ij")
    across = row * angle.cos() + column * angle.sin()
    stripes = (2 * torch.pi * (across / (4 + 4 * width) + place)).sin()
    return stripes + 0.5 * torch.randn(count, IMAGE, IMAGE, generator=generator), direction


class RelativePositionBias(nn.Module):
    """A number for each head and difference of rows and columns."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(0.02 * torch.randn((2 * SIDE - 1) ** 2, HEADS))
        place = torch.cartesian_prod(torch.arange(SIDE), torch.arange(SIDE))
        row, column = (place[:, None] - place + SIDE - 1).unbind(-1)
        self.register_buffer("entry_MN", row * (2 * SIDE - 1) + column)

    def forward(self):
        return self.table[self.entry_MN].permute(2, 0, 1)[None]  # [1, H, M, N]


def dense(query, key, value, bias):
    """What lowtide.memory_efficient_attention computes, with all scores in memory; [B, M, H, K]."""
    score_BHMN = torch.einsum("bmhk,bnhk->bhmn", query, key) / query.shape[-1] ** 0.5 + bias
    return torch.einsum("bhmn,bnhk->bmhk", score_BHMN.softmax(-1), value)


class Block(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.attend, self.bias = attend, RelativePositionBias()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, WIDTH // HEADS)).unbind(2)
        x = x + self.out(self.attend(*qkv, self.bias()).flatten(-2))
        return x + self.mlp(self.norms[1](x))


class VisionTransformer(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.embed = nn.Conv2d(1, WIDTH, PATCH, PATCH)
        self.blocks = nn.Sequential(*(Block(attend) for _ in range(DEPTH)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, DIRECTIONS))

    def forward(self, image):
        x = self.embed(image[:, None]).flatten(2).mT  # [B, M, WIDTH]
        return self.head(self.blocks(x)).mean(1)


def train(attend):
    torch.manual_seed(0)
    model, generator = VisionTransformer(attend), torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=STEPS)
    losses = []
    for _ in range(STEPS):
        image, direction = draw(BATCH, generator)
        with lowtide.peak_memory("cpu") as peak:
            loss = F.cross_entropy(model(image), direction)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    image, direction = draw(TESTED, generator)
    with torch.no_grad():
        right = (model(image).argmax(-1) == direction).float().mean().item()
    return losses, right, peak.bytes


if __name__ == "__main__":
    for name, attend in (("all scores", dense), ("lowtide", lowtide.memory_efficient_attention)):
        losses, right, peak = train(attend)
        print(
            f"{name:>10}: loss {losses[0]:.8f} at first, {losses[-1]:.8f} at last, {100 * right:.1f} % of "
            f"the unseen images right; peak memory of a step {peak / 2**20:.1f} MiB"
        )
