"""What a process that uses a card does first. To import this asks CUDA nothing."""

import torch


def give_autograd_a_context() -> None:
    """On a card, torch warns where the first that a process differentiates is a product of cuBLAS."""
    one = torch.ones((), device="cuda", requires_grad=True)
    torch.autograd.grad(one.exp(), one)
