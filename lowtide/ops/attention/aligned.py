"""Copy operands whose rows begin off 16 bytes, which kernels read slowly.

In half precision a thread loads 16 bytes at once, if each row of features begins at a multiple of
them. With 75 features it loads one number at a time, and a call takes five times as long. Torch's
own kernels cannot read such rows at all. So where a call has many scores for each number that it
reads, it runs with copies (decision 0106).

Shapes: M queries, N keys; K features of queries and keys, E of values.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from lowtide.core.autodiff import in_transform
from lowtide.core.checks import HALVES
from lowtide.core.strides import VECTOR

# Operands are copied if there are at least so many queries and so many keys: fewer if threads load
# one number at a time.
FEWEST, FEWEST_OF_SINGLE_LOADS = 256, 64
BACKENDS = ("auto", "sdpa", "triton")


def aligned_copies(
    query: Tensor, key: Tensor, value: Tensor, backend: str, *, rows_at: int
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return query, key and value with copies of those that kernels read slowly, or None.

    Zeros follow features that are no multiple of 8. Autograd follows the copies. `rows_at` is the
    dimension of queries and keys. Tensors that do not fit together are left to the checks.
    """
    operands = query, key, value
    if not all(type(each) in (Tensor, Parameter) for each in operands):
        return None
    if not (query.is_cuda and backend in BACKENDS) and backend != "triton":
        return None
    if not query.dim() == key.dim() == value.dim() > 2 or query.shape[-1] != key.shape[-1]:
        return None
    steps, lengths = [_step(each) for each in operands], (query.shape[rows_at], key.shape[rows_at])
    if not is_slow(min(steps), query.dtype, *lengths) or in_transform(*operands):
        return None
    if query.shape[-1] % VECTOR and VECTOR in steps[:2]:
        return None  # one of the two would keep its features
    query, key, value = (each if step == VECTOR else _copy(each) for each, step in zip(operands, steps))
    return query, key, value


def is_slow(step: int, dtype: torch.dtype, M: int, N: int) -> bool:
    """Return True if a call is quicker with copies, where threads load `step` numbers at once."""
    if step == VECTOR or dtype not in HALVES:
        return False
    if torch.compiler.is_compiling():  # each size that is compared would be a guard
        return True
    return min(M, N) >= (FEWEST_OF_SINGLE_LOADS if step == 1 else FEWEST)


def padded(features: int) -> int:
    """Return the features of a copy."""
    return -(-features // VECTOR) * VECTOR


def result(out: Tensor, features: int) -> Tensor:
    """Return the result of a call of copies with so many features, contiguous as without copies."""
    return out if out.shape[-1] == features else out[..., :features].contiguous()


def _step(tensor: Tensor) -> int:
    """Return how many numbers a thread may load at once, at most VECTOR.

    A graph guards neither strides nor where a tensor begins, so while one is traced only the
    features count, if they are odd.
    """
    features = tensor.shape[-1]
    if torch.compiler.is_compiling():
        return 1 if features % 2 else VECTOR
    strides = [stride for size, stride in zip(tensor.shape[:-1], tensor.stride()) if size > 1]
    if tensor.stride(-1) != 1 or 0 in strides:
        return VECTOR  # it is read by columns; a copy of what is expanded would be larger
    return math.gcd(VECTOR, features, tensor.storage_offset(), *strides)


def _copy(tensor: Tensor) -> Tensor:
    features = tensor.shape[-1]
    if features % VECTOR:
        return F.pad(tensor, (0, padded(features) - features))
    return tensor.clone(memory_format=torch.contiguous_format)
