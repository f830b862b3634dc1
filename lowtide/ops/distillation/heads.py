"""Define the tensors of both heads, and the options of a call.

Nothing here reads a tensor's data.

Shapes: N rows, D_s and D_t features of student and teacher, V classes.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lowtide.core.strides import aligned, copies_rows
from lowtide.ops.linear_cross_entropy.definition.head import VocabShard, capped, compute_dtype
from lowtide.ops.linear_cross_entropy.planning.call_memory import dense_bytes, may_depend_on_tokens
from lowtide.ops.linear_cross_entropy.planning.requirements import uses_units

Side = tuple[Tensor, Tensor, Tensor | None]
"""Input, weight and bias of one head."""

# Number of tensors of the logits' size that the dense computation holds at once. Without gradients:
# the log-softmax of both heads, and the terms of the divergence. In backward: the log-softmax of
# both heads, and the gradients of the student's logits and log-softmax.
TENSORS = 3, 4


class Heads(NamedTuple):
    """Hold the tensors of both heads."""

    student_input: Tensor  # [..., D_s]
    student_weight: Tensor  # [V, D_s]
    student_bias: Tensor | None  # [V]
    teacher_input: Tensor  # [..., D_t]
    teacher_weight: Tensor  # [V, D_t]
    teacher_bias: Tensor | None  # [V]
    ignored: Tensor | None  # [...]

    @property
    def leading(self) -> torch.Size:
        """Return the shape of the rows: that of the student's input without the last dimension."""
        return self.student_input.shape[:-1]

    @property
    def rows(self) -> int:
        return math.prod(self.leading)

    @property
    def classes(self) -> int:
        return self.student_weight.shape[0]

    @property
    def device(self) -> torch.device:
        return self.student_input.device

    @property
    def student(self) -> Side:
        """Return the student's tensors, which may get gradients."""
        return self.student_input, self.student_weight, self.student_bias

    @property
    def teacher(self) -> Side:
        """Return the teacher's tensors, which are constants."""
        return self.teacher_input, self.teacher_weight, self.teacher_bias

    def with_aligned_operands(self, options: "DistillationOptions") -> "Heads":
        """Return the same heads with copies of the operands that GEMMs on CUDA read slowly."""
        return self._replace(
            student_input=aligned(self.student_input, options.student_dtype),
            student_weight=aligned(self.student_weight, options.student_dtype),
            teacher_input=aligned(self.teacher_input, options.teacher_dtype),
            teacher_weight=aligned(self.teacher_weight, options.teacher_dtype),
        )

    def detached_teacher(self) -> "Heads":
        """Return the same heads with a teacher that autograd does not follow."""
        bias = self.teacher_bias
        return self._replace(
            teacher_input=self.teacher_input.detach(),
            teacher_weight=self.teacher_weight.detach(),
            teacher_bias=None if bias is None else bias.detach(),
        )


class DistillationOptions(NamedTuple):
    """Hold the arguments of a call that are not tensors, in the order of the operators' schema."""

    beta: float
    """The divergence: 0 for forward KL, 1 for reverse KL, a number between for Jensen-Shannon."""
    temperature: float = 1.0
    reduction: str = "mean"
    workspace: int | None = None
    student_softcap: float | None = None
    teacher_softcap: float | None = None
    student_dtype: torch.dtype = torch.float32
    """The dtype of the operands of the student's products (`operand_dtype`)."""
    teacher_dtype: torch.dtype = torch.float32
    dense: int | None = None
    """Bytes that the dense computation would hold beyond inputs, loss and gradients.

    They limit the default workspace. `with_graph_facts` sets this number, except in two cases. In a
    compiled graph the plan must not depend on the number of rows. If the heads are divided, ranks
    may have different numbers of rows.
    """
    # The fields of VocabShard, except segments.
    group: str = ""
    ranks: int = 1
    first_class: int = 0
    num_classes: int = 0
    tokens_sharded: bool = False

    @property
    def shard(self) -> VocabShard:
        """Return the place of this rank's classes."""
        return VocabShard(self.group, self.ranks, self.first_class, self.num_classes, self.tokens_sharded)

    @property
    def sum_dtype(self) -> torch.dtype:
        """Return the dtype of logits, losses and accumulators."""
        return torch.promote_types(self.student_dtype, torch.float32)

    def of(self, heads: Heads, shard: VocabShard | None) -> "DistillationOptions":
        """Return the options as the operators take them, with dtypes and this rank's classes."""
        own = {} if shard is None else shard._asdict()
        own.pop("segments", None)
        placed = self._replace(**own)
        return placed._replace(
            temperature=float(self.temperature),
            workspace=capped(self.workspace),
            student_dtype=operand_dtype(heads.student_input, heads.student_weight, placed.shard),
            teacher_dtype=operand_dtype(heads.teacher_input, heads.teacher_weight, placed.shard),
        )

    def with_graph_facts(self, heads: Heads, needs_grad: Sequence[bool]) -> "DistillationOptions":
        """Return the options plus `dense`, which is decided once for forward and backward."""
        if self.group or not may_depend_on_tokens(heads.rows):
            return self
        operands = (heads.student_input, heads.student_weight)
        tracked = [each for each, grad in zip(heads.student, needs_grad) if grad and each is not None]
        dense = dense_bytes(
            heads.rows * heads.classes,
            (each.dtype for each in operands),
            compute_dtype(heads.student_input),
            self.sum_dtype,
            tracked,
            TENSORS,
        )
        return self._replace(dense=dense)


def operand_dtype(input: Tensor, weight_VD: Tensor, shard: VocabShard) -> torch.dtype:
    """Return the dtype in which products read a head's operands: the input's, or autocast's.

    On a CPU without bfloat16 units, and on other devices with plain torch alone, no half-precision
    product has a float32 result, so operands are widened to float32 there.
    """
    dtype = compute_dtype(input)
    if input.is_cuda or uses_units(dtype, weight_VD, shard):
        return dtype
    return torch.promote_types(dtype, torch.float32)


def copies_input(input: Tensor, dtype: torch.dtype) -> bool:
    """Return True if a chunk of the input is copied, because of its dtype or its strides.

    A CPU's units read rows whose features lie side by side.
    """
    if copies_rows(input, dtype):
        return True
    by_rows = input.stride(-1) == 1 and (input.dim() == 1 or input.stride(-2) >= input.shape[-1])
    return dtype == torch.bfloat16 and not input.is_cuda and not by_rows
