"""Make the leaves of the chunks' graphs, and raise for others, whose gradient would be lost.

A tensor in a closure or a global would get no gradient, because it is no input of the call's
autograd function. A tensor that head or loss_fn keeps from a chunk depends on the chunk's copies,
and gradients of these are read only while the loop over the chunks runs.

Head or loss_fn may also make a leaf within a chunk, to differentiate an energy by it. It gets no
gradient from the call either. This is allowed if the leaf is gone after its chunk, because then
nobody can ask for its gradient.
"""

import gc
import inspect
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from lowtide.core.autodiff import graph_nodes, is_leaf
from lowtide.core.errors import ArgumentError
from lowtide.ops.chunked_loss.functional.tensors import Functional


class ChunkPass:
    """Represent one pass over the chunks, and make the leaves of their graphs.

    A gradient that reaches a leaf after the pass would be lost, so it is an error. The pass itself
    reads gradients by torch.autograd.grad, which does not call the leaves' hooks.
    """

    def __init__(self) -> None:
        self.is_over = False

    def __enter__(self) -> "ChunkPass":
        return self

    def __exit__(self, *_: object) -> None:
        self.is_over = True

    def __call__(self, leaf: Tensor) -> None:
        """Take a leaf whose `grad` a backward pass has added to."""
        if self.is_over:
            raise kept_error()

    def leaves(self, tensors: Sequence[Tensor], needs_grad: Sequence[bool]) -> tuple[Tensor, ...]:
        """Return detached copies, sharing memory; those marked require a gradient."""
        copies = tuple(
            tensor.detach().requires_grad_(grad and (tensor.is_floating_point() or tensor.is_complex()))
            for tensor, grad in zip(tensors, needs_grad)
        )
        for each in copies:
            if each.requires_grad:
                each.register_post_accumulate_grad_hook(self)
        return copies


def own_leaves(functional: Functional, loss: Tensor, known: Sequence[Tensor]) -> list[Tensor]:
    """Return the leaves of the graph of `loss` that are none of the known tensors.

    Head or loss_fn have made these leaves, or reach them in a way that `_captured` does not follow.
    `check_gone` tells the two apart.
    """
    ids = {id(tensor) for tensor in known}
    others = [leaf for leaf in _leaves(loss, known) if id(leaf) not in ids]
    if any(_is_of_pass(leaf) for leaf in others):
        raise kept_error()
    names = {id(tensor): name for name, tensor in _captured(functional)} if others else {}
    captured = [names[id(leaf)] for leaf in others if id(leaf) in names]
    if captured:
        raise captured_error(captured)
    return others


def check_gone(own: Sequence["weakref.ref[Tensor]"]) -> None:
    """Raise if own leaves live on after their chunks, because their gradient may be missed.

    The thread in which autograd computes gradients on a card holds the last node of a pass a moment
    longer than the pass takes. A leaf in a cycle of references lives until garbage is collected.
    Only an error waits a tenth of a second.
    """
    for seconds, collects in ((0, False), (1e-3, True), (0.1, True)):
        if all(leaf() is None for leaf in own):
            return
        time.sleep(seconds)
        if collects:
            gc.collect()
    alive = {id(leaf): leaf for leaf in (each() for each in own) if leaf is not None}
    if alive:
        raise captured_error([_described(leaf) for leaf in alive.values()])


def captured_names(functional: Functional, wrongly: Callable[[Tensor], bool]) -> list[str]:
    """Return the names of tensors in closures and globals for which `wrongly` returns True."""
    return list({id(tensor): name for name, tensor in _captured(functional) if wrongly(tensor)}.values())


def captured_error(names: Sequence[str]) -> ArgumentError:
    listed = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return ArgumentError(
        f"loss_fn and head must not reach what needs a gradient through a closure or a global: {listed} "
        "would get none. Pass the nn.Module itself (or its bound method) as head or loss_fn; pass "
        "anything else to it by functools.partial, as in head=partial(logits, model.lm_head) or "
        "head=partial(F.linear, weight=weight); detach what needs no gradient, and keep no tensor that they "
        "make to require one"
    )


def kept_error() -> ArgumentError:
    """Return the error for a tensor that head or loss_fn has kept from a chunk."""
    return ArgumentError(
        "head or loss_fn has kept a tensor from a chunk (a cached weight, an auxiliary loss, collected "
        "features), and it is differentiated outside of that chunk, where its gradient would be lost. "
        "Compute it before the call and pass it, as in head=partial(F.linear, weight=merged); add a term of "
        "the loss to the sum that loss_fn returns; return what is only logged with has_aux=True, or detach it"
    )


def _described(tensor: Tensor) -> str:
    return f"a tensor of shape {list(tensor.shape)}"


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


def _leaves(loss: Tensor, known: Sequence[Tensor]) -> list[Tensor]:
    """Return the leaves of the graph of `loss`; the search does not go past the known tensors."""
    if loss.grad_fn is None:
        return [loss] if loss.requires_grad else []
    ends = {tensor.grad_fn for tensor in known}
    nodes = graph_nodes(loss.grad_fn, lambda node: node not in ends)
    return [node.variable for node in nodes if is_leaf(node)]


def _is_of_pass(leaf: Any) -> bool:
    """Return True if a pass over the chunks has made this leaf."""
    return any(isinstance(hook, ChunkPass) for hook in (leaf._post_accumulate_grad_hooks or {}).values())
