import pytest
import torch


@pytest.fixture
def on_device(device):
    """What a test makes is there."""
    with torch.device(device):
        yield
