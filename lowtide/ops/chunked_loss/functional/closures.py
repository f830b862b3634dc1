"""Raise for tensors that need a gradient and come through a closure or a global.

Such a tensor would get no gradient, because it is no input of the call's autograd function.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence

from torch import Tensor, nn

from lowtide.core.autodiff import graph_nodes, is_leaf
from lowtide.core.errors import ArgumentError
from lowtide.ops.chunked_loss.functional.tensors import Functional


def check_leaves(functional: Functional, loss: Tensor, known: Iterable[Tensor]) -> None:
    """Raise if the graph of `loss` has leaves other than the known tensors."""
    ids = {id(tensor) for tensor in known}
    others = [leaf for leaf in _leaves(loss) if id(leaf) not in ids]
    if others:
        names = {id(tensor): name for name, tensor in _captured(functional)}
        raise error([names.get(id(leaf), f"a tensor of shape {list(leaf.shape)}") for leaf in others])


def captured_names(functional: Functional, wrongly: Callable[[Tensor], bool]) -> list[str]:
    """Return the names of tensors in closures and globals for which `wrongly` returns True."""
    return list({id(tensor): name for name, tensor in _captured(functional) if wrongly(tensor)}.values())


def error(names: Sequence[str]) -> ArgumentError:
    listed = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return ArgumentError(
        f"loss_fn and head must not reach what needs a gradient through a closure or a global: {listed} "
        "would get none. Pass the nn.Module itself (or its bound method) as head or loss_fn; pass "
        "anything else to it by functools.partial, as in head=partial(logits, model.lm_head) or "
        "head=partial(F.linear, weight=weight); detach what needs no gradient"
    )


def _captured(functional: Functional) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in the functions' closures and globals, named as in the code."""
    for function in (functional.head, functional.loss_fn):
        function = getattr(function, "func", function)
        function = inspect.unwrap(getattr(function, "__func__", function))
        if not inspect.isfunction(function):
            continue
        closure = inspect.getclosurevars(function)
        for name, value in {**closure.globals, **closure.nonlocals}.items():
            owners = {f"{name}.{key}": each for key, each in getattr(value, "__dict__", {}).items()}
            for owner, each in (owners | {name: value}).items():
                if isinstance(each, Tensor):
                    yield owner, each
                elif isinstance(each, nn.Module):
                    for key, parameter in each.named_parameters():
                        yield f"{owner}.{key}", parameter


def _leaves(loss: Tensor) -> list[Tensor]:
    if loss.grad_fn is None:
        return [loss] if loss.requires_grad else []
    return [node.variable for node in graph_nodes(loss.grad_fn) if is_leaf(node)]
