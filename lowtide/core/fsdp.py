"""Compute with parameters that FSDP2 shards: gather them once, and have their gradients reduced.

FSDP2 gathers the parameters of a unit (a module after fully_shard) in hooks around its forward, and
reduces their gradients after its backward. Code that multiplies by a unit's parameter outside of
these hooks finds a DTensor, sharded over the data-parallel ranks.

All names of torch's FSDP2 that are not public are in this file.
"""

import functools
import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from lowtide.core.autodiff import graph_nodes, is_leaf
from lowtide.core.collectives import is_dtensor
from lowtide.core.errors import ArgumentError
from lowtide.core.kernels.backend import marked_constant
from lowtide.core.torch_private import never_compiled, no_frame_compiled

METHOD = "_lowtide_method"
MARK = "_lowtide_tokens_differ"  # attribute that marks a parameter, or the mesh, of lowtide.shard_head
RESHAPED = "_lowtide_parameter"  # attribute that marks a parameter in another shape

PLAIN = frozenset({Tensor, nn.Parameter})

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


@no_frame_compiled
def run_in_unit(unit: Any, inputs: tuple[Tensor, ...], run: Callable[..., Any]) -> Any:
    """Return run(*inputs) as a forward method of the unit, with its parameters gathered."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    state = unit._get_fsdp_state()
    # torch frees a unit's parameters after forward. It makes an exception for the root unit, whose
    # parameters backward needs at once. So does the head's backward; without the exception they
    # would be gathered twice (decision 0011).
    if state._auto_reshard_after_forward:
        unit.set_reshard_after_forward(False, recurse=False)
    # A hook on inputs frees the unit as soon as they have gradients. Where another module of the
    # unit computed them, its backward is still to come. So the hooks see tensors without elements.
    several = len(state._modules) > 1
    state._modules_to_run_forward.discard(unit)
    results: list[Any] = []

    def method(*seen: Tensor) -> Any:
        cast = (each.to(like) for each, like in zip(inputs, seen)) if several else seen
        results.append(run(*cast))
        return results[0]

    # The hooks cast the tensors among the method's arguments, and look at them and at its result.
    # They also cast the result to the policy's output_dtype, which would round a loss. That copy is
    # dropped: the hooks that gather for backward are on the result itself.
    setattr(unit, METHOD, method)
    try:
        register_fsdp_forward_method(unit, METHOD)
        getattr(unit, METHOD)(*(each.new_empty(0) for each in inputs) if several else inputs)
    finally:
        delattr(unit, METHOD)
    if not torch.is_grad_enabled():
        unit.reshard()  # no backward does it, and what stays gathered misses the optimizer's step
    return results[0]


def find_sharded(parameter: Any) -> Sharded | None:
    """Return the place of a parameter that a unit has sharded and not gathered, or None."""
    if torch.compiler.is_compiling() or not is_dtensor(parameter):
        return None
    for unit, each in _parameters():
        if each.sharded_param is parameter:
            owner = each._module_info
            holder = owner.module if is_unit(owner.module) else unit
            return Sharded(holder, owner.module, owner.param_name)
    return None


@no_frame_compiled
def expect_gradients(parameters: Iterable[Any], result: Any) -> None:
    """Let the backward of a result, computed outside of a unit's hooks, gather and reduce the unit.

    This concerns a unit that is gathered although its forward does not run: a root unit, or one
    that is not resharded after forward, stays gathered. Without this a gradient is lost in two
    cases: no other result of the unit takes part in that backward, or one took part in an earlier
    backward. The inputs get no hook: if the unit itself computed them, their hooks would reduce and
    free it halfway.
    """
    for unit, gathered in {unit: each for unit, each in map(_find_gathered, parameters) if unit}.items():
        state = unit._get_fsdp_state()
        ended = _end_forward(state, gathered)
        if state._training_state.name == "IDLE":
            state._lazy_init()
            state._register_pre_backward_hook(result)
        if ended and not torch.is_grad_enabled():
            unit.reshard()  # as in run_in_unit


def _find_gathered(parameter: Any) -> tuple[Any, Any]:
    """Return the unit of a gathered parameter and torch's record of it, or (None, None)."""
    if not torch.compiler.is_compiling() and isinstance(parameter, nn.Parameter):
        for unit, each in _parameters():
            # `_unsharded_param` is there once the parameter was gathered.
            if getattr(each, "_unsharded_param", None) is parameter:
                return unit, each
    return None, None


def _end_forward(state: Any, record: Any) -> bool:
    """Count the use of a parameter as its module's forward; return True if the unit's forward ends.

    In torch 2.11 the forward of a unit of several modules ends after the last of them. Without
    this a unit of the last norm and the head would wait for the head beyond the step: its
    parameters would keep their old values, and its hooks would not run. Since torch 2.13 the root's
    forward ends it.
    """
    if hasattr(state, "_force_complete_incomplete_states"):
        return False
    place, waiting = record._module_info, state._modules_to_run_forward
    holders = {place.module, *place.shared_modules}
    used = {each for each in waiting if not holders.isdisjoint(each.modules())}
    waiting -= used
    if not used or waiting:
        return False
    state._training_state = state._fsdp_param_group._training_state = type(state._training_state).IDLE
    return True


def breaks_graph(*parameters: Any) -> bool:
    """Return True, in a graph, for a parameter of a unit outside of its forward: it needs hooks."""
    # Other tensors than parameters have no value before the graph runs.
    return torch.compiler.is_compiling() and any(
        isinstance(each, nn.Parameter) and _belongs_to_idle_unit(each) for each in parameters
    )


@marked_constant
def _belongs_to_idle_unit(parameter: nn.Parameter) -> bool:
    return any(
        parameter is each.sharded_param or parameter is getattr(each, "_unsharded_param", None)
        for unit, each in _parameters()
        if unit._get_fsdp_state()._training_state.name == "IDLE"
    )


@never_compiled("FSDP2 gathers a head in hooks: leave out fullgraph, or call this in its unit's forward")
def uncompiled(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a function outside of the graph that is being compiled."""
    return function(*arguments, **options)


def gathers_head(function: Function) -> Function:
    """Let a function of (input, linear_weight, target, *, linear_bias) take sharded parameters.

    It then runs as a forward method of the unit: one all-gather before it, and one reduce-scatter
    of the gradients after its backward. If the unit is gathered already, its backward is told to
    expect gradients.
    """

    @functools.wraps(function)
    def run(input: Tensor, linear_weight: Tensor, target: Tensor, **options: Any) -> Any:
        bias = options.get("linear_bias")
        if breaks_graph(linear_weight, bias):
            return uncompiled(run, input, linear_weight, target, **options)
        if _in_no_unit(linear_weight, bias):
            return function(input, linear_weight, target, **options)
        refuse_unreduced("linear_weight", linear_weight)
        refuse_unreduced("linear_bias", bias)
        place, bias_place = find_sharded(linear_weight), find_sharded(bias)
        if place is None and bias_place is None:
            if not options.get("tokens_sharded"):
                refuse_derived("linear_weight", linear_weight)
            result = function(input, linear_weight, target, **options)
            expect_gradients((linear_weight, bias), result)
            return result
        if options.get("tokens_sharded"):
            raise ArgumentError(
                "tokens_sharded=True is for a head whose classes stay divided, got a linear_weight that "
                "FSDP2 gathers: leave tokens_sharded out, or divide the classes by lowtide.shard_head"
            )
        if place is not None and bias_place is None and is_dtensor(bias):
            raise ArgumentError(
                "linear_bias must be a parameter that FSDP2 shards with linear_weight, got a DTensor that is "
                "no parameter, but a copy; pass the parameter itself"
            )
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


def _in_no_unit(*tensors: Tensor | None) -> bool:
    """Return True if the tensors are plain leaves, and FSDP2 shards no module of this process."""
    if torch.compiler.is_compiling():  # Dynamo reads no grad_fn
        return False
    for each in tensors:
        if each is not None and (type(each) not in PLAIN or each.grad_fn is not None):
            return False
    composable = sys.modules.get("torch.distributed._composable_state")
    return composable is None or not composable._module_state_mapping


def reshaped(parameter: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a parameter with its first dimension unflattened; it still counts as a parameter."""
    found: Tensor = parameter.unflatten(0, shape)
    if is_dtensor(parameter) and is_parameter(parameter) and not torch.compiler.is_compiling():
        setattr(found, RESHAPED, True)
    return found


def is_parameter(tensor: Any) -> bool:
    return isinstance(tensor, nn.Parameter) or getattr(tensor, RESHAPED, False)


def refuse_derived(name: str, tensor: Any) -> None:
    """Raise for a DTensor that is computed from a parameter that FSDP2 shards, as by detach().

    Its placements are those of a tensor-parallel weight, whose ranks have the same tokens. A copy
    that bears the mark of lowtide.shard_head is known not to be one.
    """
    if torch.compiler.is_compiling() or not is_dtensor(tensor):
        return
    if is_parameter(tensor) or getattr(tensor, MARK, False) or not _shards_on_mesh_of(tensor):
        return
    gc.collect()  # a unit that is no longer used may be waiting for this
    if _shards_on_mesh_of(tensor):
        raise ArgumentError(
            f"{name} must be the parameter that FSDP2 shards, got a DTensor that is computed from it, as by "
            ".detach() or state_dict(): its shards would be taken for a tensor-parallel weight, whose ranks "
            "have the same tokens; pass the parameter itself (under torch.no_grad() if it is to have no "
            "gradient), or the whole of a detached one by .full_tensor()"
        )


def _shards_on_mesh_of(tensor: Any) -> bool:
    """Return True if FSDP2 shards a plain parameter on the mesh of this DTensor."""
    return any(
        is_dtensor(each.sharded_param)
        and each.sharded_param.device_mesh == tensor.device_mesh
        and not getattr(each, "is_dtensor", False)
        for _, each in _parameters()
    )


def check_gathered(name: str, parameter: Tensor, advice: str) -> None:
    """Raise for a parameter that a unit has sharded and not gathered."""
    if find_sharded(parameter) is not None:
        raise ArgumentError(f"{name} is sharded by FSDP2 here, outside of the forward of its unit: {advice}")


def refuse_other_replicas(parameter: Any) -> None:
    """Raise if a unit around a head of lowtide.shard_head averages over ranks beyond the head's.

    A unit on a mesh of two dimensions shards over one and averages gradients over both. The head's
    gradient is averaged over the ranks of its own mesh alone, and its replicas would train apart.
    """
    if torch.compiler.is_compiling():
        return
    mesh = parameter.device_mesh
    for unit, group in _groups():
        around = getattr(getattr(group, "mesh_info", None), "mesh", None)  # private to torch
        if around is None or around.size() <= mesh.size() or not _holds_parameter_on(mesh, unit):
            continue
        beyond = sorted(set(around.mesh.flatten().tolist()) - set(mesh.mesh.flatten().tolist()))
        raise ArgumentError(
            "the mesh of lowtide.shard_head must have all ranks over which FSDP2 averages gradients, got "
            f"{mesh.size()} of the {around.size()} ranks of the unit around the head: the head's gradient "
            f"would miss ranks {beyond}; call shard_head with one dimension of all of them, "
            "mesh._flatten('dp') of the mesh that fully_shard gets"
        )


def _holds_parameter_on(mesh: Any, unit: nn.Module) -> bool:
    return any(is_dtensor(each) and each.device_mesh == mesh for each in unit.parameters())


def refuse_unreduced(name: str, tensor: Any) -> None:
    """Raise for a tensor that is computed from `full_tensor()` of a sharded parameter.

    Its gradient would be that of this rank's tokens alone, since torch assumes that all ranks
    compute the same. This concerns the parameters of FSDP2 and of lowtide.shard_head.
    """
    if torch.compiler.is_compiling():  # Dynamo of torch 2.11 reads no grad_fn
        return
    for node in graph_nodes(getattr(tensor, "grad_fn", None), lambda node: not _makes_whole(node)):
        # Where the caller says how gradients are placed, they are reduced.
        if not _makes_whole(node) or getattr(node, "grad_placements", None) is not None:
            continue
        variables = (each.variable for each in graph_nodes(node) if is_leaf(each))
        if any(find_sharded(each) is not None or getattr(each, MARK, False) for each in variables):
            raise ArgumentError(
                f"{name} must be the parameter itself, which is gathered once and whose gradient is reduced, "
                "got full_tensor() of a parameter that FSDP2 shards: its gradient would be that of this "
                "rank's tokens alone, without an error; leave out .full_tensor()"
            )


def _makes_whole(node: Any) -> bool:
    """Return True for the node of DTensor.full_tensor() in a graph."""
    return type(node).__name__ == "_ToTorchTensorBackward"


def _parameters() -> Iterator[tuple[Any, Any]]:
    """Yield the unit and torch's record of every parameter that FSDP2 shards."""
    for unit, group in _groups():
        for each in group.fsdp_params:
            yield unit, each


def _groups() -> Iterator[tuple[Any, Any]]:
    """Yield every unit that shards parameters, with torch's record of each group of these."""
    composable = sys.modules.get("torch.distributed._composable_state")
    for module in list(composable._module_state_mapping) if composable else ():
        if not is_unit(module):
            continue
        state: Any = module._get_fsdp_state()
        # Before torch 2.13 a unit has one group at most.
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        yield from ((module, group) for group in groups if group)
