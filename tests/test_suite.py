"""What the suite does to torch leaves what it is used with as it is."""

import torch


def test_a_device_is_given_to_memory_that_is_full_of_nan():
    """In a process that has not asked for the table of constructors before, tests/conftest.py did that."""
    with torch.device("meta"):
        assert torch.nn.Embedding(3, 3).weight.device.type == "meta"
        assert torch.empty(2).device.type == "meta"
    assert torch.empty(2).isnan().all()
