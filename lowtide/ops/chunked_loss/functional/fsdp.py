"""Gather the parameters of an FSDP2 unit once around all chunks.

The loop over the chunks runs as one forward method of the unit (core/fsdp.py). Within the loop,
each chunk calls the unit's `forward` without its hooks.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lowtide.core.errors import ArgumentError
from lowtide.core.fsdp import expect_gradients, is_unit, run_in_unit


def gathered(head: Any, hidden: tuple[Tensor, ...], run: Callable[[tuple[Tensor, ...]], Any]) -> Any:
    """Return run(hidden); if head is an FSDP2 unit, gather its parameters once around the call."""
    unit = getattr(head, "__self__", head)
    _check_head(head)
    if not is_unit(unit):
        result = run(hidden)
        parameters = unit.parameters() if isinstance(unit, nn.Module) else ()
        expect_gradients(parameters, result)
        return result
    return run_in_unit(unit, hidden, lambda *hidden: run(hidden))


def check_units(modules: Mapping[str, nn.Module], head: Any) -> None:
    """Raise for FSDP2 units other than head: each chunk would gather and reduce them."""
    for name, module in modules.items():
        if is_unit(module) and module is not getattr(head, "__self__", head):
            raise ArgumentError(
                f"{name} is an FSDP unit, which only head may be, itself or by a bound method; make it part "
                "of head, or make one unit of the module whose forward calls chunked_loss"
            )


def forward_of(head: Any) -> Any:
    """Return the function to call for each chunk: head, or the forward of an FSDP2 unit."""
    if not is_unit(head):
        return head
    if len(head._forward_hooks) + len(head._forward_pre_hooks) > 2:
        raise ArgumentError(
            "head is an FSDP unit with forward hooks of its own; they would be skipped: register them on a "
            "module inside it, or make a unit of the module whose forward calls chunked_loss"
        )
    return head.forward


def _check_head(head: Any) -> None:
    """Raise for a head that DDP wraps, or that has FSDP units inside."""
    if isinstance(head, DistributedDataParallel):
        raise ArgumentError(
            "head must not be a DistributedDataParallel, whose forward may run only once a step: pass "
            "head.module, and wrap the model that it belongs to"
        )
    if not isinstance(head, nn.Module):
        return
    inner = [name for name, module in head.named_modules() if module is not head and is_unit(module)]
    if inner:
        raise ArgumentError(
            f"head must be one FSDP unit, but has others inside: {', '.join(inner)}. They would be "
            "gathered for each chunk; fully_shard head as a whole"
        )
