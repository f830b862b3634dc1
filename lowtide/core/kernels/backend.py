"""Tell what a device can run: calls at all, Triton kernels, or Gluon ones (engines/gemm/gluon.py).

`cdiv` and `next_power_of_2` compute on the host what a kernel's grid needs. Triton's functions of
these names serve kernels as well, and take 2 microseconds a call (decision 0023).

The functions named `has_...` are the only ones that ask for a compute capability. Each says which
instructions or kernels of the GPU it stands for.

Gluon is part of Triton, is marked as experimental, and has renamed things between releases.
Therefore Gluon is imported only where `pipelines_on` returns True.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])

KNOWN = ((3, 6), (3, 9))  # first and last Triton release with the functions that we use

# Fewest multiplications of a GEMM for which the Gluon kernel is used, 0.1 ms on an H200. Its launch
# takes the host longer than that of a Triton kernel, and with many short GEMMs the GPU would wait.
FEWEST = 1 << 35  # decision 0080

# The most rows of one GEMM that forms dX, but for few features in the exponentials engine. cuBLAS
# divides taller GEMMs less well: 5120 rows of 4096 features, accumulated over 128k classes, make a
# step 2 % slower as one GEMM (decision 0032).
PRODUCT_ROWS = 2048


def is_there(device: torch.device) -> bool:
    """Return True if the device is an NVIDIA GPU that this machine has.

    A tensor that is only described (a fake one) may name a GPU on a machine without one.
    """
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.is_available()


def has_bfloat16_mma(device: torch.device) -> bool:
    """Return True if tensor cores multiply bfloat16, and copies to shared memory are asynchronous.

    sm_80 (Ampere) brought both, and every later generation has them. Attention's kernels multiply
    float32 operands as pieces of bfloat16.
    """
    return is_there(device) and torch.cuda.get_device_capability(device) >= (8, 0)


def has_warpgroup_mma(device: torch.device) -> bool:
    """Return True if a warpgroup multiplies tiles of shared memory into its registers (wgmma).

    sm_90 (Hopper) alone has this instruction: sm_100 (Blackwell) has tcgen05 in its place, which
    sums in tensor memory, and sm_120 has neither. Tensor maps (TMA) came with sm_90 as well, and
    later generations have them. But the tiles that are read through them, and their share of the
    227 KiB of shared memory, were measured with wgmma.
    """
    return is_there(device) and torch.cuda.get_device_capability(device)[0] == 9


def has_cudnn_unequal_features(device: torch.device, first_release: int) -> bool:
    """Return True if cuDNN's attention has gradients where values have fewer features than keys.

    cuDNN has these kernels for sm_90 and for sm_100 and sm_103, from one of its releases on.
    """
    if not is_there(device) or (torch.backends.cudnn.version() or 0) < first_release:
        return False
    major, minor = torch.cuda.get_device_capability(device)
    return major == 10 or (major, minor) == (9, 0)


@functools.cache
def pipelines_on(device: torch.device) -> bool:
    """Return True on a GPU with wgmma (Hopper), with a Triton release that we know."""
    if not has_warpgroup_mma(device):
        return False
    import triton

    release = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return KNOWN[0] <= release <= KNOWN[1]


def is_large_gemm(*sizes: int) -> bool:
    """Return True if a GEMM of these sizes takes so long that its launch time does not matter."""
    return math.prod(sizes) >= FEWEST


def tma_compatible(*tensors: Tensor) -> bool:
    """Return True if tensor maps can read the matrices.

    A tensor map requires contiguous rows that each begin at a multiple of 16 bytes.
    """
    return all(
        each.numel() > 0
        and each.stride(1) == 1
        and each.stride(0) >= each.shape[1]
        and each.stride(0) * each.element_size() % 16 == 0
        and each.data_ptr() % 16 == 0
        for each in tensors
    )


def marked_constant(function: Function) -> Function:
    """Let compiled graphs take the function's result as a constant, untraced.

    It is called while a graph is traced, with the graph's own inputs. The result must depend on
    machine and process alone, or stay the same as long as these inputs do.
    torch.compiler.assume_constant_result sets the same mark, but imports all of torch.compile.
    """
    function.__dict__["_dynamo_marked_constant"] = True
    return function


def reason_against(device: torch.device) -> str | None:
    """Return why no call can be right on the device, or None."""
    if device.type == "mps" and _macos_is_old():
        # pytorch/pytorch issue 104832
        return "before macOS 15 torch leaves out the results of products that it should write into slices"
    return None


@marked_constant
def reason_against_triton(device: torch.device, dtype: torch.dtype, argument: str) -> str | None:
    """Return why Triton kernels cannot run on this argument's device in this dtype, or None."""
    try:
        import triton
    except ModuleNotFoundError:
        return "triton is not installed"
    if device.type != "cuda":
        from triton.runtime.jit import JITFunction

        # The interpreter must be requested before Triton is imported. Triton's own functions, which
        # our kernels call, are made for the interpreter at import or not at all.
        interprets = triton.knobs.runtime.interpret and not isinstance(triton.language.cdiv, JITFunction)
        if device.type != "cpu" or not interprets:
            return f"its kernels run on CUDA tensors, and {argument} is on {device}"
    return f"its kernels sum in float32, and {argument} is float64" if dtype == torch.float64 else None


@marked_constant
def _macos_is_old() -> bool:
    mps = torch.backends.mps
    return mps.is_available() and not mps.is_macos_or_newer(15, 0)


def cdiv(total: int, step: int) -> int:
    """Return total / step, rounded up."""
    return -(-total // step)


def next_power_of_2(size: int) -> int:
    """Return the smallest power of 2 that is no smaller than the size, at least 1."""
    return 1 << max(size - 1, 0).bit_length()
