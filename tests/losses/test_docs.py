"""Every example of docs/losses.md runs, one after the other, and leaves a loss that can be differentiated."""

import re
from pathlib import Path

import torch
import torch.nn.functional as F

import lowtide
from lowtide import losses

PAGE = Path(__file__).parents[2] / "docs" / "losses.md"
B, T, D, V = 3, 6, 4, 11


def test_examples():
    labels = torch.randint(V, (2 * B, T))
    labels[:, :2] = -100
    hidden = torch.randn(2 * B, T, D, requires_grad=True)
    names = {
        "torch": torch,
        "F": F,
        "linear_log_probs": lowtide.linear_log_probs,
        **{name: getattr(losses, name) for name in losses.__all__},
        "head": torch.nn.Linear(D, V),
        "reference_head": torch.nn.Linear(D, V),
        "hidden": hidden,
        "reference_hidden": torch.randn(2 * B, T, D),
        "labels": labels,
        "mismatched_hidden": torch.randn(2 * B, T, D),
        "mismatched_labels": labels,
        "mismatched_reference": torch.full((2 * B,), -9.0),
        "desirable": torch.arange(2 * B) % 2 == 0,
        "rewards": torch.randn(2 * B),
        "group_size": B,
        "temperature": 0.7,
        "old": torch.full((2 * B, T - 1), -2.0),
        "reference_log_prob": torch.full((2 * B, T - 1), -2.0),
        "image": torch.randn(B, D, requires_grad=True),
        "text": torch.randn(B, D, requires_grad=True),
        "queue": torch.randn(5, D),
        "log_scale": torch.tensor(1.0, requires_grad=True),
    }
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 7
    for block in blocks:
        names.pop("loss", None)
        if block.startswith("loss = loss"):
            names["loss"] = 0.0
        exec(block, names)
        assert names["loss"].isfinite(), block
        assert names["loss"].requires_grad, block
        names["loss"].backward(retain_graph=True)
    assert hidden.grad[:, 1:5].abs().sum() > 0
    assert names["log_scale"].grad != 0
