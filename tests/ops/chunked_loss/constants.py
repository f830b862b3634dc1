"""Change a constant of head or loss_fn between the two runs of a chunk."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lowtide.ops.chunked_loss import chunked_loss
from tests.ops.chunked_loss.helpers import D, V


def scaled(logits, labels, factor):
    return F.cross_entropy(logits * factor, labels, reduction="sum")


def inputs(device="cpu"):
    head, hidden = nn.Linear(D, V).to(device, torch.float64), torch.randn(29, D, dtype=torch.float64)
    return head, hidden.to(device).requires_grad_(), torch.randint(V, (29,)).to(device)


def check(loss_fn, change, head=None, *, names="", hidden=None):
    own, own_hidden, labels = inputs()
    head, hidden = own if head is None else head, own_hidden if hidden is None else hidden
    for mode in ("recompute", "gradient_in_forward"):
        random_state = torch.get_rng_state()
        loss = chunked_loss(loss_fn, head, hidden, labels, chunk_size=7, mode=mode)
        torch.set_rng_state(random_state)
        if mode == "recompute":  # nothing has changed so far: twice, which it must not mind
            (before,) = torch.autograd.grad(loss, hidden, retain_graph=True)
            torch.autograd.grad(loss, hidden, retain_graph=True)
            with torch.no_grad():
                change()
            with pytest.raises(RuntimeError, match=f"must not change.*{names}.*gradient_in_forward"):
                loss.backward()
        else:  # it continues with the new values, for which it has the gradients already
            (after,) = torch.autograd.grad(loss, hidden)
            assert not torch.allclose(before, after)
