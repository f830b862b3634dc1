"""FSDP2: the head's parameters are gathered once a step, not once a chunk.

A module that fully_shard made a unit of gathers its parameters in hooks around its forward. Here the loop
over the chunks runs as one forward method of the unit
(torch.distributed.fsdp.register_fsdp_forward_method), and inside it the unit's plain `forward` is called,
which no hook surrounds.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lowtide.chunked_loss.check import ArgumentError

METHOD = "_lowtide_chunks"


def gathered(head: Any, hidden: tuple[Tensor, ...], run: Callable[[tuple[Tensor, ...]], Any]) -> Any:
    """run(hidden), with the parameters of `head` gathered around it if they are sharded."""
    unit = getattr(head, "__self__", head)
    _check(head)
    if not _is_unit(unit):
        return run(hidden)
    from torch.distributed.fsdp import register_fsdp_forward_method

    # The hooks cast and look at the tensors among the arguments of the method, and at its result.
    setattr(unit, METHOD, lambda *hidden: run(hidden))
    try:
        register_fsdp_forward_method(unit, METHOD)
        return getattr(unit, METHOD)(*hidden)
    finally:
        delattr(unit, METHOD)


def check_units(modules: Mapping[str, nn.Module], head: Any) -> None:
    """Units that `gathered` does not know of would be gathered, and reduced, for each chunk."""
    for name, module in modules.items():
        if _is_unit(module) and module is not getattr(head, "__self__", head):
            raise ArgumentError(
                f"{name} is an FSDP unit, which only head may be, itself or by a bound method; make it part "
                "of head, or make one unit of the module whose forward calls chunked_loss"
            )


def forward_of(head: Any) -> Any:
    """`head` as it is called for each chunk."""
    if not _is_unit(head):
        return head
    if len(head._forward_hooks) + len(head._forward_pre_hooks) > 2:
        raise ArgumentError(
            "head is an FSDP unit with forward hooks of its own; they would be skipped: register them on a "
            "module inside it, or make a unit of the module whose forward calls chunked_loss"
        )
    return head.forward


def _check(head: Any) -> None:
    if isinstance(head, DistributedDataParallel):
        raise ArgumentError(
            "head must not be a DistributedDataParallel, whose forward is once a step: pass "
            "head.module, and wrap the model that it belongs to"
        )
    if not isinstance(head, nn.Module):
        return
    inner = [key for key, module in head.named_modules() if module is not head and _is_unit(module)]
    if inner:
        raise ArgumentError(
            f"head must be one FSDP unit, but has others inside: {', '.join(inner)}. They would be "
            "gathered for each chunk; fully_shard head as a whole"
        )


def _is_unit(module: Any) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # who has a unit has imported it
    return fsdp is not None and isinstance(module, getattr(fsdp, "FSDPModule", ()))
