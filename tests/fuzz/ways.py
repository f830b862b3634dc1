"""How a call is differentiated. Each way gives the same results, and gradients of the leaves."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.fuzz.draw import Draw
from tests.support.budgets import Result

Leaves = dict[str, Tensor]
Function = Callable[[Leaves], Mapping[str, Tensor]]
Upstream = Mapping[str, Tensor | None]
"""Of each result; None, or nothing, where nothing is made of it."""

WAYS = (
    *(6 * ["grad"]),
    *("backward", "retained", "checkpoint", "reentrant", "copied", "turned", "saved on the CPU"),
    *("no_grad", "inference_mode", "vjp", "vmap", "create_graph", "not contiguous", "accumulated"),
)
TRANSFORMS = ("vjp", "vmap", "create_graph")


def pick_way(draw: Draw) -> str:
    return draw.pick("way", WAYS)


def differentiated(function: Function, leaves: Leaves, upstream: Upstream, way: str) -> Result:
    """Results and gradients; without gradients where the way has none."""
    if way in ("no_grad", "inference_mode"):
        with torch.no_grad() if way == "no_grad" else torch.inference_mode():
            return dict(function(leaves))
    if way == "vjp":
        return _by_vjp(function, leaves, upstream)
    outputs = _called(function, leaves, way)
    used = [(outputs[name], seed) for name, seed in upstream.items() if seed is not None]
    roots = [root for root, _ in used]
    seeds = [seed.to(root.dtype) for root, seed in used]
    results = {name: output.detach() for name, output in outputs.items()}
    if way == "not contiguous":
        seeds = [_turned(seed) for seed in seeds]
    if way in ("backward", "retained", "reentrant", "accumulated"):
        return results | _by_backward(roots, seeds, leaves, way)
    gradients = torch.autograd.grad(
        roots, list(leaves.values()), seeds, create_graph=way == "create_graph", materialize_grads=True
    )
    return results | {name: each.detach() for name, each in zip(leaves, gradients)}


def _called(function: Function, leaves: Leaves, way: str) -> Mapping[str, Tensor]:
    if way in ("checkpoint", "reentrant"):
        names: list[str] = []

        def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
            outputs = function(dict(zip(leaves, tensors)))
            names[:] = list(outputs)
            return tuple(outputs.values())

        outputs = checkpoint(flat, *leaves.values(), use_reentrant=way == "reentrant")
        return dict(zip(names, outputs))
    if way in ("copied", "turned"):
        pack = _contiguous if way == "copied" else _turned
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return function(leaves)
    if way == "saved on the CPU":
        with torch.autograd.graph.save_on_cpu():
            return function(leaves)
    if way == "vmap":
        outputs = torch.func.vmap(lambda stacked: dict(function(stacked)))(
            {name: leaf.unsqueeze(0) for name, leaf in leaves.items()}
        )
        return {name: output[0] for name, output in outputs.items()}
    return function(leaves)


def _by_vjp(function: Function, leaves: Leaves, upstream: Upstream) -> Result:
    own = {name: leaf.detach() for name, leaf in leaves.items()}

    def parted(leaves: Leaves) -> tuple[Result, Result]:
        found = function(leaves)
        floating = {name: output for name, output in found.items() if output.is_floating_point()}
        return floating, {name: output for name, output in found.items() if name not in floating}

    outputs, pull, others = torch.func.vjp(parted, own, has_aux=True)
    seeds = {
        name: torch.zeros_like(output) if upstream.get(name) is None else upstream[name].to(output.dtype)
        for name, output in outputs.items()
    }
    (gradients,) = pull(seeds)
    return outputs | others | gradients


def _by_backward(roots: Sequence[Tensor], seeds: Sequence[Tensor], leaves: Leaves, way: str) -> Result:
    for leaf in leaves.values():
        leaf.grad = None
    if way == "retained":  # a first time, which must leave no trace
        torch.autograd.backward(roots, [-2 * seed for seed in seeds], retain_graph=True)
        for leaf in leaves.values():
            leaf.grad = None
    if way == "accumulated":
        for leaf in leaves.values():
            leaf.grad = torch.zeros_like(leaf)
    torch.autograd.backward(roots, seeds)
    found = {
        name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()
    }
    for leaf in leaves.values():
        leaf.grad = None
    return found


def second_order(function: Function, leaves: Leaves, upstream: Upstream) -> Result:
    """The gradient of a fixed mixture of the gradient."""
    outputs = function(leaves)
    used = [(outputs[name], seed) for name, seed in upstream.items() if seed is not None]
    used = [(root, seed) for root, seed in used if root.requires_grad]
    tensors = list(leaves.values())
    first = torch.autograd.grad(
        [root for root, _ in used],
        tensors,
        [seed.to(root.dtype) for root, seed in used],
        create_graph=True,
        materialize_grads=True,
    )
    generator = torch.Generator().manual_seed(3)
    mixed = torch.zeros((), dtype=torch.float64, device=tensors[0].device)
    for each in first:
        # Numbers of eight bits: autograd gives them to a gradient in its own dtype, float16
        # perhaps.
        mixture = torch.randn(each.shape, generator=generator).bfloat16().double()
        mixed = mixed + (each.double() * mixture.to(each.device)).sum()
    if not mixed.requires_grad:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    second = torch.autograd.grad(mixed, tensors, materialize_grads=True, allow_unused=True)
    return dict(zip(leaves, second))


def _contiguous(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _turned(tensor: Tensor) -> Tensor:
    """The same numbers, the first dimension's side by side."""
    return tensor.movedim(0, -1).contiguous().movedim(-1, 0) if tensor.dim() > 1 else tensor.clone()
