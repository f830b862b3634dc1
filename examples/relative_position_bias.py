"""Fit a relative-position bias as T5 does: `python examples/relative_position_bias.py`, on a CPU.

A teacher attends with a bias that depends on the distance of query and key alone, looked up by
bucket: near distances have one each, far ones share one the more, the farther they are. A student
sees what the teacher returns, and learns the table through the gradient of the bias. It runs twice:
with all scores at once, and with lowtide, which holds the bias and its gradient, and no scores.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

import lowtide

BATCH, TOKENS, HEADS, FEATURES, STEPS = 4, 256, 4, 16, 40
BUCKETS, FARTHEST = 32, 128


def bucket_of(distance):
    """Of key minus query: half of the buckets for each side; of these half for near distances, one
    each, and half for far ones, up to FARTHEST, evenly in their logarithm."""
    side, near = BUCKETS // 2, BUCKETS // 4
    away = distance.abs()
    steps = (away.clamp(min=near) / near).log() / math.log(FARTHEST / near) * (side - near)
    far = (near + steps.long()).clamp(max=side - 1)
    return torch.where(away < near, away, far) + side * (distance > 0)


class RelativePositionBias(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(BUCKETS, HEADS)
        place = torch.arange(TOKENS)
        self.register_buffer("bucket_MN", bucket_of(place - place[:, None]))

    def forward(self):
        return self.table(self.bucket_MN).permute(2, 0, 1)[None]  # [1, H, M, N]


def dense(query, key, value, bias):
    """What lowtide.memory_efficient_attention computes, with all scores in memory; [B, M, H, K]."""
    score_BHMN = torch.einsum("bmhk,bnhk->bhmn", query, key) / FEATURES**0.5 + bias
    return torch.einsum("bhmn,bnhk->bmhk", score_BHMN.softmax(-1), value)


@torch.no_grad()
def difference(student, teacher):
    """Of the two tables, as weights of the buckets that occur: a constant on a whole head changes
    nothing, and a bucket that nobody attends to is not known better by anyone. From 0 to 1."""
    used = student.bucket_MN.unique()
    student_weight, teacher_weight = (each.table.weight[used].softmax(0) for each in (student, teacher))
    return ((student_weight - teacher_weight).abs().sum(0) / 2).mean().item()


def fit(attend):
    torch.manual_seed(0)
    teacher, student = RelativePositionBias().requires_grad_(False), RelativePositionBias()
    nn.init.zeros_(student.table.weight)
    optimizer = torch.optim.Adam(student.parameters(), lr=0.2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    losses = []
    for _ in range(STEPS):
        query, key, value = torch.randn(3, BATCH, TOKENS, HEADS, FEATURES)
        target = attend(query, key, value, teacher())
        with lowtide.peak_memory("cpu") as peak:
            loss = F.mse_loss(attend(query, key, value, student()), target)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return losses, difference(student, teacher), peak.bytes


if __name__ == "__main__":
    for name, attend in (("all scores", dense), ("lowtide", lowtide.memory_efficient_attention)):
        losses, error, peak = fit(attend)
        print(
            f"{name:>10}: loss {losses[0]:.8f} at first, {losses[-1]:.8f} at last, {100 * error:.1f} % of "
            f"the weights misplaced; peak memory of a step {peak / 2**20:.1f} MiB"
        )
