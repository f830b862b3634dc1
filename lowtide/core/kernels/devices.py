"""Treat devices that are neither the CPU nor CUDA.

CUDA has kernels of lowtide's own, and half-precision products with float32 results. The CPU has its
caches, and bfloat16 products in C++. Every other device (Apple's mps, Intel's xpu) runs plain torch
alone: operands are widened to float32, and bytes are counted as on the CPU. Nothing there is
float64 unless the caller passes it, since mps has no float64.
"""

import torch
from torch import Tensor


def counted_as(device_type: str) -> str:
    """Return the device type whose sizes divide a call: "cuda" or "cpu"."""
    return "cuda" if device_type == "cuda" else "cpu"


def runs_plain_torch(device_type: str) -> bool:
    """Return True for a device with plain torch alone: any but the CPU, CUDA and meta."""
    return device_type not in ("cpu", "cuda", "meta")


def frexp(number: Tensor) -> tuple[Tensor, Tensor]:  # 0-d
    """Return mantissa and exponent, by the CPU where the device may lack the operation (mps)."""
    if not runs_plain_torch(number.device.type):
        return torch.frexp(number)
    mantissa, exponent = torch.frexp(number.cpu())
    return mantissa.to(number.device), exponent.to(number.device)
