"""Hold the arguments that the Triton kernels of one call share.

Every kernel that computes scores takes these arguments in the same groups and the same order. So a
launch reads like the kernel's list of parameters.

Shapes: B batches; H query heads, G key heads, R = H / G; M queries, N keys; K features of queries
and keys, E of values. dz is the gradient of the softmax's input z.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide.core.kernels.backend import cdiv
from lowtide.ops.attention.definition import dropout
from lowtide.ops.attention.definition.operands import AttentionOptions, AttentionSizes, Operands, sizes
from lowtide.ops.attention.triton_backend.kernels.bf16_split import piece_count, precision, split
from lowtide.ops.attention.triton_backend.kernels.dropout import dropout_keys_kernel
from lowtide.ops.attention.triton_backend.tile_sizes import Tile, find_tile, shared_memory

# The number of dropout keys that one program computes.
DROPOUT_KEYS = 1024
# The most 16-bit numbers that one load instruction of a thread reads: 16 bytes.
VECTOR = 8
# Fields whose first dimension is the batch, or 1. A strip of some batches takes a slice of each.
WITH_BATCHES = (
    *("query", "key", "value", "bias", "row_key", "grad_output", "grad_logsumexp", "row_terms"),
    *("grad_query", "grad_key", "grad_value", "grad_bias", "bias_sum"),
)
Strides = tuple[int, ...]


class Scalars(NamedTuple):
    """Hold the scale of the scores, and dropout's limit and rescale (definition/dropout.py)."""

    scale: float
    limit: int
    rescale: float


class KernelCall(NamedTuple):
    """Hold the tensors and constants that kernels take, for one call or some of its batches."""

    size: AttentionSizes
    dtype: torch.dtype
    """The operands' dtype before `split`."""
    pieces: int
    """The number of bfloat16 pieces of each operand (bf16_split.py); 1 means no split."""
    query: Tensor
    """As in Operands, or [count, B, H, M, K] after `split`; key and value likewise."""
    key: Tensor
    value: Tensor
    bias: Tensor | None
    """As in Operands, but a bool bias is viewed as uint8."""
    first: Tensor | None
    end: Tensor | None
    row_key: Tensor | None
    """Dropout's row keys, [B, H, M], int32; column_key holds its column keys, [N]."""
    column_key: Tensor | None
    scalars: Scalars
    constants: dict[str, Any]
    """The compile-time constants of every kernel that computes scores (kernels/tiles.py)."""
    step: int
    """A divisor of K, E and each row's offset, which kernels rely on (step_of, tiles.multiple)."""
    # The following fields are for backward only.
    grad_output: Tensor | None = None
    """The upstream gradient of the result, in pieces if the query is."""
    grad_logsumexp: Tensor | None = None
    row_terms: Tensor | None = None
    """The numbers that delta_kernel writes for each row, [B, H, 2 or 3, M]."""
    row_first: Tensor | None = None
    """[N], like row_end: the queries that see key j are row_first[j] <= i < row_end[j]."""
    row_end: Tensor | None = None
    grad_query: Tensor | None = None
    """Memory for the query's gradient; None if it is not needed. The next two fields likewise."""
    grad_key: Tensor | None = None
    grad_value: Tensor | None = None
    grad_bias: Tensor | None = None
    """Memory for the gradient of a bias with more than one row and more than one column."""
    transposed_bias: Tensor | None = None
    """The bias as [keys, queries], which the kernel of dk and dv reads faster (decision 0097).

    Its rows are padded with zeros to a multiple of VECTOR queries.
    """
    bias_sum: Tensor | None = None
    """Sums of dz over the queries, [B, H, 1, N], for a bias that is the same for all queries."""

    @property
    def operands(self) -> tuple[Tensor | None, ...]:
        """Return the tensors that kernels load in tiles of rows and features."""
        return self.query, self.key, self.value, self.grad_output

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return the first arguments of every kernel that computes scores."""
        vectors = self.first, self.end, self.row_key, self.column_key
        return self.query, self.key, self.value, self.bias, *vectors

    @property
    def strides(self) -> tuple[Strides, ...]:
        operands = (strides_of(each) for each in (self.query, self.key, self.value))
        return *operands, broadcast_strides(self.bias)

    @property
    def lse_strides(self) -> Strides:
        return (0, 0, 0) if self.grad_logsumexp is None else self.grad_logsumexp.stride()

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return H, R, M, N, K and E."""
        _, H, _, M, N, K, E = self.size
        return H, self.size.R, M, N, K, E

    def of_batches(self, batches: slice) -> "KernelCall":
        """Return the call with these batches only; tensors that all batches share stay whole."""
        tensors = ((name, getattr(self, name)) for name in WITH_BATCHES)
        own = {name: x[batches] for name, x in tensors if x is not None and x.shape[0] > 1}
        return self._replace(**own)

    def split(self, heads: slice, key_heads: slice, loaded_once: Sequence[str] = ()) -> "KernelCall":
        """Return the call with the operands of these heads only, split into pieces.

        If pieces is 1, return the call unchanged, with all heads. loaded_once names operands that
        stay in float32: a program loads them only once, and splits them itself.
        """
        if self.pieces == 1:
            return self
        whole = {"query": heads, "key": key_heads, "value": key_heads, "grad_output": heads}
        tensors = ((name, getattr(self, name)) for name in whole)
        own = {name: x[:, whole[name]] for name, x in tensors if x is not None}
        names = [name for name in own if name not in loaded_once]
        pieces = dict(zip(names, split([own[name] for name in names], self.pieces)))
        return self._replace(**own | pieces)

    def tile(self, kernel: str) -> Tile:
        found = self.find_tile(kernel)
        assert found is not None
        return found

    def is_cut(self, tile: Tile) -> bool:
        """Return True if tiles may reach beyond the queries or keys, or a mask may hide scores."""
        return self.first is not None or self.size.M % tile.M > 0 or self.size.N % tile.N > 0

    def find_tile(self, kernel: str) -> Tile | None:
        """Return the tile of a kernel, or None if the kernel cannot take K or E features."""
        bias = self.bias
        row_bias_bytes = bias.itemsize if bias is not None and bias.shape[2] > 1 else 0
        half, room = self.dtype.itemsize == 2, shared_memory(self.query.device)
        narrow = all(each is None or strides_of(each)[2] != 1 for each in self.operands)
        sizes = self.size.K, self.size.E
        transposed = self.transposed_bias is not None
        return find_tile(
            kernel, self.pieces, half, *sizes, room, row_bias_bytes, transposed=transposed, narrow=narrow,
            step=self.step,
        )  # fmt: skip


def kernel_call(operands: Operands, options: AttentionOptions) -> KernelCall:
    """Return the arguments of the call's kernels; with dropout, compute its keys."""
    size, (query, key, value, bias, first, end, seed) = sizes(operands), operands
    row_key = column_key = None
    scalars = Scalars(options.scale, 0, 1.0)
    if seed is not None:
        row_key, column_key = _dropout_keys(seed, size)
        rate = options.dropout
        scalars = Scalars(options.scale, dropout.limit(rate), dropout.rescale(rate))
    constants = {
        "SOFTCAP": options.softcap,
        "PRECISION": precision(),
        "BASE_2": query.dtype.itemsize == 2 and not operands.adds_bias,
        "COLUMN_BIAS": bias is not None and bias.shape[2] == 1,
        "BIAS_STEP": 1 if bias is None else step_of((bias,), size.N),
    }
    if bias is not None and bias.dtype == torch.bool:
        bias = bias.view(torch.uint8)
    vectors = first, end, row_key, column_key
    pieces = piece_count(query.dtype)
    # Float32 gets no hint of alignment. Rows of pieces are padded to a multiple of 16 features,
    # which Triton detects by itself. In kernels that do not split float32, the hint was not
    # measured (decision 0065).
    step = 1 if pieces > 1 else step_of((query, key, value), size.K, size.E)
    return KernelCall(size, query.dtype, pieces, query, key, value, bias, *vectors, scalars, constants, step)


def _dropout_keys(seed: Tensor, size: AttentionSizes) -> tuple[Tensor, Tensor]:
    """Return dropout's row keys [B, H, M] and column keys [N], int32."""
    B, H, _, M, N, _, _ = size
    row_key = torch.empty(B, H, M, dtype=torch.int32, device=seed.device)
    column_key = torch.empty(N, dtype=torch.int32, device=seed.device)
    row_programs = cdiv(B * H * M, DROPOUT_KEYS)
    programs = row_programs + cdiv(N, DROPOUT_KEYS)
    if programs:
        dropout_keys_kernel[(programs,)](
            seed, row_key, column_key, B * H * M, row_programs, H, M, N, BLOCK=DROPOUT_KEYS
        )
    return row_key, column_key


def step_of(operands: Iterable[Tensor | None], *features: int) -> int:
    """Return the largest number up to VECTOR that divides the features and each row's offset.

    Offsets count elements from address 0. If 16 divides the features and all strides, return 1,
    whatever the address: Triton detects such a divisor by itself.
    """
    given = [each for each in operands if each is not None]
    numbers = list(features)
    for each in given:
        numbers += (stride for size, stride in zip(each.shape[:-1], each.stride()) if size > 1)
    if not any(number % 16 for number in numbers):
        return 1
    return math.gcd(VECTOR, *(each.data_ptr() // each.itemsize for each in given), *numbers)


def strides_of(tensor: Tensor | None) -> Strides:
    """Return a tensor's strides in the order that kernels read; zeros for None.

    Of pieces [count, B, H, I, F], the first stride, from piece to piece, moves to the end.
    """
    if tensor is None:
        return 0, 0, 0, 0
    strides = tensor.stride()
    return strides if len(strides) == 4 else (*strides[1:], strides[0])


def broadcast_strides(bias: Tensor | None) -> Strides:
    """Return a bias's strides, with 0 for each dimension of size 1; zeros for None."""
    if bias is None:
        return 0, 0, 0, 0
    return tuple(0 if size == 1 else stride for size, stride in zip(bias.shape, bias.stride()))
