"""Compute with parameters that FSDP2 shards: gather them once, and have their gradients reduced.

FSDP2 gathers the parameters of a unit (a module after fully_shard) in hooks around its forward, and
reduces their gradients behind it. What multiplies by a unit's parameter elsewhere finds a DTensor
that is sharded over the data-parallel ranks.

All names of torch's FSDP2 that are not public are in this file.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from lowtide.core.collectives import is_dtensor
from lowtide.core.errors import ArgumentError

METHOD = "_lowtide_method"

Function = TypeVar("Function", bound=Callable[..., Any])


class Sharded(NamedTuple):
    """Hold a parameter's place in the unit that shards it."""

    unit: nn.Module
    module: nn.Module
    name: str

    def gathered(self) -> Tensor:
        """Return the whole parameter, within a forward method of the unit."""
        found: Tensor = getattr(self.module, self.name)
        return found


def is_unit(module: Any) -> bool:
    """Return True for an FSDP2 unit."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # a unit exists only if this is imported
    return fsdp is not None and isinstance(module, getattr(fsdp, "FSDPModule", ()))


def run_in_unit(unit: Any, inputs: tuple[Tensor, ...], run: Callable[..., Any]) -> Any:
    """Return run(*inputs) as a forward method of the unit, with its parameters gathered."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    # torch frees a unit's parameters after forward. It makes an exception for the root unit, whose
    # parameters backward needs at once. So does the head's backward; without the exception they
    # would be gathered twice (decision 0011).
    if unit._get_fsdp_state()._auto_reshard_after_forward:
        unit.set_reshard_after_forward(False, recurse=False)
    # The hooks cast the tensors among the method's arguments, and look at them and at its result.
    setattr(unit, METHOD, lambda *inputs: run(*inputs))
    try:
        register_fsdp_forward_method(unit, METHOD)
        return getattr(unit, METHOD)(*inputs)
    finally:
        delattr(unit, METHOD)


def find_sharded(parameter: Any) -> Sharded | None:
    """Return the place of a parameter that a unit has sharded and not gathered, or None."""
    if torch.compiler.is_compiling() or not is_dtensor(parameter):
        return None
    for unit, each in _parameters():
        if each.sharded_param is parameter:
            owner = each._module_info
            return Sharded(owner.module if is_unit(owner.module) else unit, owner.module, owner.param_name)
    return None


def gathers_head(function: Function) -> Function:
    """Let a function of (input, linear_weight, target, *, linear_bias) take sharded parameters.

    It then runs as a forward method of the unit: one all-gather before it, and one reduce-scatter
    of the gradients behind its backward.
    """

    @functools.wraps(function)
    def run(input: Tensor, linear_weight: Tensor, target: Tensor, **options: Any) -> Any:
        refuse_unreduced("linear_weight", linear_weight)
        place, bias = find_sharded(linear_weight), options.get("linear_bias")
        bias_place = None if bias is None else find_sharded(bias)
        if options.get("tokens_sharded") or (place is None and bias_place is None):
            return function(input, linear_weight, target, **options)
        if place is None or (bias_place is not None and bias_place.unit is not place.unit):
            raise ArgumentError(
                "linear_weight and linear_bias must be parameters of one FSDP2 unit, which gathers both, got "
                "them of two; apply fully_shard to the module that holds both"
            )

        def gathered(input: Tensor) -> Any:
            own = options if bias_place is None else options | {"linear_bias": bias_place.gathered()}
            return function(input, place.gathered(), target, **own)

        return run_in_unit(place.unit, (input,), gathered)

    return run  # type: ignore[return-value]


def check_gathered(name: str, parameter: Tensor) -> None:
    """Raise for a parameter that a unit has sharded and not gathered."""
    if find_sharded(parameter) is not None:
        raise ArgumentError(
            f"{name} is sharded by FSDP2 here, outside of the forward of its unit: make a unit of head "
            "(fully_shard(head) before its parent's), or call this in the forward of the unit that head is "
            "part of"
        )


def refuse_unreduced(name: str, tensor: Any) -> None:
    """Raise for `parameter.full_tensor()` of a parameter that FSDP2 shards.

    Its gradient would be this rank's alone: torch assumes that each rank has the same.
    """
    if torch.compiler.is_compiling():
        return
    node = getattr(tensor, "grad_fn", None)
    if type(node).__name__ != "_ToTorchTensorBackward":
        return
    if getattr(node, "grad_placements", None) is not None:
        return  # the caller says how gradients are placed
    while node is not None and not hasattr(node, "variable"):
        node = node.next_functions[0][0] if node.next_functions else None
    if node is not None and find_sharded(node.variable) is not None:
        raise ArgumentError(
            f"{name} must be the parameter itself, which is gathered once and whose gradient is reduced, got "
            "full_tensor() of a parameter that FSDP2 shards: its gradient would be that of this rank's "
            "tokens alone, without an error; leave out .full_tensor()"
        )


def _parameters() -> Iterator[tuple[Any, Any]]:
    """Yield the unit and torch's record of every parameter that FSDP2 shards."""
    composable = sys.modules.get("torch.distributed._composable_state")
    for module in list(composable._module_state_mapping) if composable else ():
        if not is_unit(module):
            continue
        state: Any = module._get_fsdp_state()
        # Before torch 2.13 a unit has one group at most.
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for group in groups:
            for each in group.fsdp_params if group else ():
                yield module, each
