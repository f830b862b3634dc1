"""Sinks beside several sequences in each row of the batch."""

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from lowtide.integrations.transformers.attention import attention  # noqa: E402
from lowtide.integrations.transformers.masks import PackedMask  # noqa: E402
from tests.integrations.dense import exactly  # noqa: E402

H, M, K = 4, 12, 8
LENGTHS = [5, 7, 2, 9, 1]  # lengths of the sequences, one after the other; none crosses the end of a row


@pytest.mark.parametrize(
    ("name", "shape"), [("s_aux", (H,)), ("sinks", (2, H, M, 1)), ("sinks", (1, H, 1, 1))]
)
def test_sinks(name, shape):
    query, key, value = (torch.randn(2, heads, M, K, dtype=torch.float64) for heads in (H, 2, 2))
    sinks = torch.randn(shape, dtype=torch.float64)
    leaves = [each.requires_grad_() for each in (query, key, value, sinks)]
    sequence_BM = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS)).view(2, M)
    same_BMN = sequence_BM[:, :, None] == sequence_BM[:, None]
    dense_B1MN = (same_BMN & torch.ones(M, M, dtype=torch.bool).tril())[:, None]
    upstream = torch.randn(2, M, H, K, dtype=torch.float64)
    dense_sinks = {name: sinks.expand(2, H, M, 1) if name == "sinks" else sinks}
    found, expected = (
        (out, *torch.autograd.grad(out, leaves, upstream))
        for out in (
            attention(nn.Module(), query, key, value, PackedMask(LENGTHS, None, M), **{name: sinks})[0],
            exactly(nn.Module(), query, key, value, dense_B1MN, **dense_sinks)[0],
        )
    )
    for ours, want in zip(found, expected):
        torch.testing.assert_close(ours, want)
