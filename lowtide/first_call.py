"""Prepare the first call of the loss: `warmup` compiles what it will need, out of the way."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lowtide.core.errors import ArgumentError, ArgumentTypeError
from lowtide.ops.linear_cross_entropy import linear_cross_entropy
from lowtide.ops.linear_cross_entropy.definition.head import ROW_FACTORS

# Nothing that a CPU compiles depends on the number of tokens.
CPU_TOKENS = 16


def warmup(
    shapes: Iterable[tuple[int, int, int]],
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    **options: Any,
) -> None:
    """Compile what `linear_cross_entropy` needs for these shapes, before the first step.

    Example::

        lowtide.warmup([(16_384, 4096, 128_256)], softcap=30.0)

    For each shape it runs the call itself, forward and backward, on tensors of zeros, and frees
    them. So it compiles the same kernels in the same specialisations as a step with these sizes,
    and takes the time of one such step beside that. Triton and the C++ compiler keep what they
    built in their caches on disk, so that a warmup also serves later processes. On the CPU it takes
    at most 16 tokens: there only the C++ products of bfloat16 tensors are compiled, once for all
    sizes.

    Args:
        shapes: (N, D, V) of each call: tokens, features, classes. N is the number of rows of one
            call: batch times length. Another N may be computed in other chunks, whose kernels are
            compiled when first needed.
        dtype: of input and weight. Under `torch.autocast`, call it as the step is called: there,
            with the weight's dtype.
        device: None for the current CUDA device, or the CPU where there is none.
        options: of `linear_cross_entropy`, with their values in training. In place of a tensor (a
            bias, weights of the classes or of the rows) pass True.

    Memory:
        On CUDA that of a step: input, weight, the gradients of both and the workspace. It is given
        back to the device. On the CPU the weight and its gradient.

    Precision:
        No result is kept, and no generator of random numbers is used.

    Raises:
        ValueError, TypeError: for shapes that are not three numbers above 0, and as the call does.
    """
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    for shape in [_checked(shape) for shape in _listed(shapes)]:
        _run(*shape, dtype, place, options)
    if place.type == "cuda":
        torch.cuda.synchronize(place)
        torch.cuda.empty_cache()


def _listed(shapes: Any) -> list[Any]:
    try:
        return list(shapes)
    except TypeError:
        raise ArgumentTypeError(f"shapes must be a list of (N, D, V), got {shapes!r}") from None


def _checked(shape: Any) -> tuple[int, int, int]:
    """Return the shape; refuse anything but three numbers above 0."""
    if not isinstance(shape, (tuple, list, torch.Size)) or len(shape) != 3:
        raise ArgumentTypeError(f"shapes must be a list of (N, D, V), got {shape!r} in it")
    if not all(isinstance(size, int) and size > 0 for size in shape):
        raise ArgumentError(f"shapes must have three sizes above 0, (N, D, V), got {tuple(shape)}")
    return tuple(shape)


def _run(N: int, D: int, V: int, dtype: torch.dtype, device: torch.device, options: dict[str, Any]) -> None:
    rows = min(N, CPU_TOKENS) if device.type == "cpu" else N
    # A caller may be in inference mode or under no_grad.
    with torch.inference_mode(False), torch.enable_grad():

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device, requires_grad=True)

        made = {
            "linear_bias": zeros(V),
            "weight": torch.ones(V, device=device),
            **{name: torch.ones(rows, device=device) for name in ROW_FACTORS},
        }
        given = {name: made.get(name, value) if value is True else value for name, value in options.items()}
        target_N = torch.zeros(rows, dtype=torch.int64, device=device)
        linear_cross_entropy(zeros(rows, D), zeros(V, D), target_N, **given).sum().backward()
