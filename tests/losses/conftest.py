import pytest
import torch


@pytest.fixture
def on_device(device):
    """A test's tensors are made on the device."""
    with torch.device(device):
        yield
