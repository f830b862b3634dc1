"""Which inputs have rows that are read in place."""

import pytest
import torch

from lowtide.core.strides import copies_rows

VIEWS = {
    "whole": lambda x: x,
    "a shifted slice": lambda x: x[:, :, :-1],
    "of one sequence": lambda x: x[:1, :, :-1],
    "a dimension of one between": lambda x: x[:, :1],
    "a slice beside a dimension of one": lambda x: x[:, :1, :-1],
    "one row": lambda x: x[:1, :1, :1],
    "transposed": lambda x: x.transpose(0, 2),
}


@pytest.mark.parametrize("name", VIEWS)
def test_rows_copied_without_view(name):
    input = VIEWS[name](torch.randn(2, 3, 4, 8))
    try:
        input.view(-1, 8)
        copied = False
    except RuntimeError:
        copied = True
    assert copies_rows(input, torch.float32) == copied
