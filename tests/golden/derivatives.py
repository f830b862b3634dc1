"""Ways to run a function of a row's tensors: its values, and derivatives of each kind."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.golden.given import Function, Outputs


def named_outputs(found: Any) -> Outputs:
    """The tensors of a result, by name."""
    if isinstance(found, Tensor):
        return {"out": found}
    if hasattr(found, "_asdict"):
        found = found._asdict()
    pairs = found.items() if isinstance(found, dict) else enumerate(found)
    return {
        f"{name}.{inner}".removesuffix(".out"): tensor
        for name, each in pairs
        for inner, tensor in named_outputs(each).items()
    }


def upstream(out: Tensor) -> Tensor:
    """A gradient of `out` that is no power of two, and differs from number to number."""
    if out.dim() == 0:
        return torch.full_like(out, -0.7)
    return torch.linspace(-1, 1.3, out.numel(), device=out.device).view(out.shape).to(out.dtype)


def _differentiable(outputs: Outputs) -> list[Tensor]:
    return [out for out in outputs.values() if out.requires_grad]


def _gradients_of(results: Sequence[Tensor], leaves: dict[str, Tensor], **options: Any) -> Outputs:
    found = torch.autograd.grad(
        results, list(leaves.values()), [upstream(each) for each in results], allow_unused=True, **options
    )
    return {f"grad {name}": each for name, each in zip(leaves, found) if each is not None}


def values(function: Function, leaves: dict[str, Tensor]) -> Outputs:
    with torch.no_grad():
        return named_outputs(function(*leaves.values()))


def gradients(function: Function, leaves: dict[str, Tensor]) -> Outputs:
    outputs = named_outputs(function(*leaves.values()))
    return outputs | _gradients_of(_differentiable(outputs), leaves)


def gradients_twice(function: Function, leaves: dict[str, Tensor]) -> Outputs:
    """Two backward passes of one graph, the second of another upstream gradient."""
    (out,) = _differentiable(named_outputs(function(*leaves.values())))
    first = _gradients_of([out], leaves, retain_graph=True)
    return first | {f"again {name}": each for name, each in _gradients_of([3 * out], leaves).items()}


def double_backward(function: Function, leaves: dict[str, Tensor]) -> Outputs:
    outputs = named_outputs(function(*leaves.values()))
    first = _gradients_of(_differentiable(outputs), leaves, create_graph=True)
    second = _gradients_of([each for each in first.values() if each.requires_grad], leaves)
    return outputs | first | {f"second {name}": each for name, each in second.items()}


def jvp(function: Function, leaves: dict[str, Tensor]) -> Outputs:
    primals = tuple(each.detach() for each in leaves.values())
    out, tangent = torch.func.jvp(function, primals, tuple(map(upstream, primals)))
    return {"out": out, "tangent": tangent}


def vmap_of_grad(function: Function, leaves: dict[str, Tensor]) -> Outputs:
    first, *others = (each.detach() for each in leaves.values())

    def weighted(*own: Tensor) -> Tensor:
        out = function(*own)
        return (out * upstream(out)).sum()

    of_one = torch.func.grad(weighted, argnums=tuple(range(len(leaves))))
    found = torch.func.vmap(of_one, in_dims=(0, *(None for _ in others)))(
        torch.stack([first, 0.5 * first]), *others
    )
    return {f"grads {name}": each for name, each in zip(leaves, found)}


def hessian(function: Function, leaves: dict[str, Tensor]) -> Outputs:
    primals = tuple(each.detach() for each in leaves.values())
    return {"hessian": torch.func.hessian(function)(*primals)}


def compiled(function: Function, leaves: dict[str, Tensor]) -> Outputs:
    return gradients(torch.compile(function, backend="aot_eager", fullgraph=True), leaves)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Torch's own attention kernels on CUDA give the same bits only so."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
