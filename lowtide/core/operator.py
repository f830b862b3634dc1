"""Register operators with torch.library, for every device."""

import functools
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, get_type_hints

import torch
from torch import Tensor, nn
from torch.library import Library, define, impl

from lowtide.core import torch_private

# Registrations end when this object is freed.
LIBRARY = Library("lowtide", "FRAGMENT")

# The schema's names of types; other types have the names that Python gives them.
SCHEMA_TYPES: dict[Any, str] = {
    Tensor | None: "Tensor?",
    tuple[Tensor, ...]: "Tensor[]",
    torch.dtype: "ScalarType",
    int | None: "int?",
    float | None: "float?",
}

_direct: dict[Any, Callable[..., list[Tensor]]] = {}
"""The function that runs an operator, and its derivative if any, without torch's dispatcher."""


def call(operator: Any, *arguments: Any) -> list[Tensor]:
    """Call an operator; skip torch's dispatcher where nothing in it would look at the call.

    The dispatcher converts all arguments twice each way, which takes the host 0.1 ms or more.
    """
    if torch.compiler.is_compiling() or not seen_by_nobody(arguments):
        return operator(*arguments)  # type: ignore[no-any-return]
    return without_dispatcher(operator)(*arguments)


def without_dispatcher(operator: Any) -> Callable[..., list[Tensor]]:
    """Return the function that runs an operator, for calls that may skip torch's dispatcher."""
    return _direct.get(operator, operator)


def seen_by_nobody(arguments: Iterable[Any]) -> bool:
    """Return True if a call with these arguments may skip torch's dispatcher."""
    return _nobody_looks() and _are_plain(arguments)


def _nobody_looks() -> bool:
    """Return True if no mode, transform, trace or profile has to see the operators."""
    return (
        torch_private.dispatch_modes() == 0
        and torch_private.function_modes() == 0
        and torch_private.current_level() is None
        and not torch_private.profiles()
        and not torch.jit.is_tracing()
    )


def _are_plain(arguments: Iterable[Any]) -> bool:
    """Return True if all tensors, alone or in lists, are plain tensors on the CPU or CUDA.

    The dispatcher negates tensors that have torch's negative bit, and gives memory to tensors of
    zeros that have none. Without the dispatcher our kernels would read other numbers there. Nor do
    they unwrap tensors that outlive their transform.
    """
    for each in arguments:
        kind = type(each)
        if kind is Tensor or kind is nn.Parameter:
            if not (each.is_cuda or each.is_cpu) or each.is_neg() or each._is_zerotensor():
                return False
            if torch_private.is_wrapped(each):
                return False
        elif isinstance(each, Tensor) or (kind in (list, tuple) and not _are_plain(each)):
            return False
    return True


def schema_of(fields: type) -> str:
    """Return the arguments of a schema, one for each field of a named tuple."""
    types = get_type_hints(fields).items()
    return ", ".join(f"{SCHEMA_TYPES.get(kind) or kind.__name__} {name}" for name, kind in types)


def operator(name: str, schema: str) -> Callable[[Callable[..., Any]], Any]:
    """Register the decorated function as torch.ops.lowtide.<name>, and return that operator.

    Derivatives are registered separately. Without one, a call that needs gradients raises an error.

    torch.library.custom_op is not used: its wrappers take 50 us of host time a call, and its first
    call imports Dynamo, which takes 2 to 3 s.
    """
    define(f"lowtide::{name}", schema, tags=(torch.Tag.pt2_compliant_tag,))

    def registered(function: Callable[..., Any]) -> Any:
        @functools.wraps(function)
        def run(*arguments: Any) -> Any:
            if torch.is_grad_enabled() and _need_gradients(arguments):
                raise RuntimeError(
                    f"lowtide::{name} has no derivative of its own; call the function of lowtide that it "
                    "belongs to, which has one, or call this operator under torch.no_grad()"
                )
            return function(*arguments)

        impl(f"lowtide::{name}", "CompositeExplicitAutograd", run)
        made = getattr(torch.ops.lowtide, name).default
        _direct[made] = run
        return made

    return registered


def derivative(
    operator: Any, backward: Callable[..., tuple[Any, ...]], *, setup_context: Callable[..., None]
) -> None:
    """Register the derivative of an operator that takes tensors or lists of them, returning a list.

    The tensors and lists come first in the operator's schema. As with
    torch.library.register_autograd, `setup_context` gets ctx, inputs and output. `backward` gets
    ctx and the gradients of the output, and returns one entry per argument: a list where the
    argument is a list. register_autograd takes 0.2 ms more of host time per step, most of it in
    pytrees.
    """

    if torch_private.below_autograd is None or torch_private.after_autograd_keyset is None:
        torch.library.register_autograd(operator, backward, setup_context=setup_context, lib=LIBRARY)
        del _direct[operator]
        return
    schema = [(str(argument.type), argument.default_value) for argument in operator._schema.arguments]
    kinds = [kind for kind, _ in schema if "Tensor" in kind]
    assert all("Tensor" in kind for kind, _ in schema[: len(kinds)])
    defaults, lists = tuple(default for _, default in schema), [kind == "List[Tensor]" for kind in kinds]
    implementation = _direct[operator]

    def compute(keys: Any, arguments: Sequence[Any]) -> list[Tensor]:
        """Compute the operator below autograd; without keys, skip the dispatcher."""
        with torch_private.below_autograd():
            if keys is None:
                return implementation(*arguments)
            return operator.redispatch(keys & torch_private.after_autograd_keyset, *arguments)  # type: ignore[no-any-return]

    class Derivative(torch.autograd.Function):
        # Autograd sees tensors only as arguments of their own, so lists are passed item by item.
        # All other arguments are passed as one, since each takes time.
        @staticmethod
        def forward(
            ctx: Any, keys: Any, lengths: Sequence[int | None], others: tuple[Any, ...], *items: Tensor | None
        ) -> tuple[Tensor, ...]:
            arguments = [*_in_lists(items, lengths), *others]
            output = compute(keys, arguments)
            ctx.lengths = lengths
            setup_context(ctx=ctx, inputs=arguments, output=output)
            return tuple(output)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
            needed = ctx.needs_input_grad
            ctx.needs_input_grad = _in_lists(needed[3:], ctx.lengths)
            try:
                found = backward(ctx, gradients)
            finally:
                ctx.needs_input_grad = needed  # a retained graph runs this once more
            return (None, None, None, *_one_by_one(found[: len(lists)], ctx.lengths))

    # Profiles and anomaly mode name a node after its class.
    name = operator._schema.name.partition("::")[2]
    function: Any = type(Derivative)(name, (Derivative,), {})  # type: ignore[misc]

    def run(keys: Any, *arguments: Any) -> Any:
        tensors = arguments[: len(lists)]
        if not (torch.is_grad_enabled() and _need_gradients(tensors)):
            return compute(keys, arguments)
        # The dispatcher leaves out arguments that have their default.
        tensors += defaults[len(tensors) : len(lists)]
        others = arguments[len(lists) :] + defaults[max(len(arguments), len(lists)) :]
        lengths = [len(each) if is_list else None for each, is_list in zip(tensors, lists)]
        return list(function.apply(keys, lengths, others, *_one_by_one(tensors, lengths)))

    LIBRARY.impl(operator, run, "Autograd", with_keyset=True)
    _direct[operator] = functools.partial(run, None)


def _one_by_one(arguments: Iterable[Any], lengths: Iterable[int | None]) -> list[Any]:
    """Return the arguments, with each list that has a length replaced by its items."""
    items: list[Any] = []
    for argument, length in zip(arguments, lengths, strict=True):
        if length is None:
            items.append(argument)
        else:
            items += argument
    return items


def _in_lists(items: Iterable[Any], lengths: Iterable[int | None]) -> list[Any]:
    """Return the arguments from their items, as they were before `_one_by_one`."""
    rest = iter(items)
    return [next(rest) if length is None else list(islice(rest, length)) for length in lengths]


def _need_gradients(arguments: Iterable[Any]) -> bool:
    """Return True if a tensor requires a gradient; tensors are passed alone or in lists."""
    for each in arguments:
        if isinstance(each, Tensor):
            if each.requires_grad:
                return True
        elif isinstance(each, (list, tuple)) and _need_gradients(each):
            return True
    return False
