"""Which calls the kernels in Gluon take (gluon.py). Gluon is Triton's, is called experimental, and has
renamed things: only where this says so is it imported."""

import functools
import math

import torch
from torch import Tensor

KNOWN = ((3, 6), (3, 9))  # the first and the last release of Triton that has what is used

# Multiplications of a product, at least. A launch takes the host longer than one of Triton's, and the card
# waits where many are short: 250 of 17 GFLOP (2,048 tokens in 64 MiB) took 44 ms instead of 16.
FEWEST = 1 << 39  # decision 0039


@functools.cache
def pipelines_on(device: torch.device) -> bool:
    """A card that is not there, of a tensor that is described only, is none of these."""
    if device.type != "cuda" or torch.version.hip or not torch.cuda.is_available():
        return False
    if torch.cuda.get_device_capability(device)[0] != 9:
        return False
    import triton

    release = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return KNOWN[0] <= release <= KNOWN[1]


def worth(*sizes: int) -> bool:
    """Whether a product of these sizes takes so long that its launch does not count."""
    return math.prod(sizes) >= FEWEST


def mapped(*tensors: Tensor) -> bool:
    """A tensor map wants rows of numbers that lie side by side, each row's place a multiple of 16 bytes."""
    return all(
        each.numel() > 0
        and each.stride(1) == 1
        and each.stride(0) >= each.shape[1]
        and each.stride(0) * each.element_size() % 16 == 0
        and each.data_ptr() % 16 == 0
        for each in tensors
    )


def kernels_run_on_the_cpu() -> bool:
    """Through Triton's interpreter, which has to be asked for before Triton is imported: its own functions,
    which kernels call, are made for it then or never."""
    import triton
    from triton.runtime.jit import JITFunction

    return triton.knobs.runtime.interpret and not isinstance(triton.language.cdiv, JITFunction)
