"""Check which tensors torch's own CUDA kernels can read.

The kernels load 16 bytes at once. If an address is not a multiple of 16, cuDNN's kernels compute
garbage without an error, and the others fail with a misaligned address.

Shapes: B batches, H heads, M rows (of queries or keys), K features.
"""

import torch
from torch import Tensor

BYTES = 16
# A kernel that counts a tensor's elements in 32 bits goes wrong from this many on.
NUMBERS = 1 << 31

# The rate of dropout in lowtide's calls of torch's kernels. Torch 2.11 caches cuDNN's plans by the
# strides of query, key and value, but not by those of the output and its gradient. A plan made for
# other strides of these two misreads them without an error. The cache also tells rates of dropout
# apart. So with -0.0, lowtide's calls share no plan with other code of the program. Among lowtide's
# calls, the strides of the output and its gradient follow from those of query.
NO_DROPOUT = -0.0


def reason_against(*tensors: Tensor) -> str | None:
    """Return why torch's CUDA kernels may misread one of these tensors [B, H, M, K], or None."""
    # torch.compile does not know addresses. Compiled code checks them when it runs (kernels.py).
    has_address = not torch.compiler.is_compiling()
    step = BYTES // tensors[0].element_size()
    for tensor in tensors:
        B, H, M, K = tensor.shape
        b, h, m, k = tensor.stride()
        if k != 1:
            return "it needs features that lie side by side"
        if b % step or h % step or m % step:
            return f"its strides must be multiples of {step}"
        if min(b, h, m) < K:
            return "it is not known to read rows that share memory, as expanded ones do"
        if max(B * b, H * h, M * m) >= NUMBERS:
            return "it is not known to read beyond 2^31 numbers"
        if has_address and not is_aligned(tensor):
            return f"its tensors must begin at multiples of {BYTES} bytes"
    return None


def is_aligned(tensor: Tensor) -> bool:
    """Return True if the tensor is known to begin at a multiple of 16 bytes.

    A fake tensor has no address; its memory is assumed to be aligned, so that its offset decides.
    Nothing is known about tensors of any other class that does not hold its numbers itself.
    """
    if type(tensor) is Tensor or type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__:
        return tensor.data_ptr() % BYTES == 0
    from torch._subclasses.fake_tensor import FakeTensor  # slow to import

    offset = tensor.storage_offset() * tensor.element_size()
    return isinstance(tensor, FakeTensor) and offset % BYTES == 0


def readable(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy that torch's kernels can read."""
    on_cuda = tensor.device.type == "cuda"
    if (reason_against(tensor) is None) if on_cuda else (tensor.stride(3) == 1):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def readable_in(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return the tensor, or a copy in these strides if torch's CUDA kernels need one.

    These kernels read the tensor correctly if it has the strides and an aligned address.
    """
    if tensor.device.type != "cuda" or (tensor.stride() == strides and is_aligned(tensor)):
        return tensor
    copy = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)
