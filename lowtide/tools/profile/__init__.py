"""Memory over time: recorded from the allocator, as a snapshot for PyTorch's viewer and as a picture."""
