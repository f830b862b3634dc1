"""What a process that uses a card does first. To import this asks CUDA nothing."""

import torch


def give_autograd_a_context() -> None:
    """On a card, torch warns if a process first differentiates a product of cuBLAS."""
    one = torch.ones((), device="cuda", requires_grad=True)
    torch.autograd.grad(one.exp(), one)
