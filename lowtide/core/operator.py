"""Register operators with torch.library, for the CPU and CUDA."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.library import define, impl


def operator(name: str, schema: str) -> Callable[[Callable[..., Any]], Any]:
    """Register the decorated function as torch.ops.lowtide.<name>, and return that operator.

    Derivatives are registered separately. Without them a call that needs gradients raises.

    torch.library.custom_op is not used: its wrappers take 50 us of host time a call, and its first
    call imports Dynamo, which takes 2 to 3 s.
    """
    define(f"lowtide::{name}", schema, tags=(torch.Tag.pt2_compliant_tag,))

    def registered(function: Callable[..., Any]) -> Any:
        @functools.wraps(function)
        def run(*arguments: Any) -> Any:
            if torch.is_grad_enabled() and any(_need_gradients(arguments)):
                raise RuntimeError(
                    f"lowtide::{name} has no derivative of its own; call the function of lowtide that it "
                    "belongs to, which has, or this under torch.no_grad()"
                )
            return function(*arguments)

        impl(f"lowtide::{name}", ("cpu", "cuda"), run)
        return getattr(torch.ops.lowtide, name).default

    return registered


def _need_gradients(arguments: Iterable[Any]) -> Iterable[bool]:
    """Yield requires_grad of each tensor; tensors are passed alone or in lists."""
    for each in arguments:
        if isinstance(each, Tensor):
            yield each.requires_grad
        elif isinstance(each, (list, tuple)):
            yield from _need_gradients(each)
