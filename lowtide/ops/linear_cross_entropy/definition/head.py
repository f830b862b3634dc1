"""Define what a call computes: the tensors of a head, and the labels and options of a loss.

    logits = softcap tanh(scale (sum_k x_k W_k^T + b) / softcap)

for inputs x_k, weights W_k and the bias b; without a soft cap scale (sum_k x_k W_k^T + b). A head
is a sum of linear terms. The first has the head's own weight, and an adapter may add others (LoRA:
x W^T + (s x A^T) B^T). The head of a K-dimensional loss has one term, with a weight for each
position. Nothing here reads a tensor's data.

A head whose classes are divided over the ranks of a group is called sharded: each rank has the
weight's rows [V_r, D] of its own classes, and the same slice of the bias, of class weights and of
class probabilities.

Shapes: N tokens, D_k features of term k, V classes, of which rank r holds V_r; P positions.
"""

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

Reduction = Literal["mean", "sum", "none"]
Backend = Literal["auto", "triton", "torch", "reference"]


class VocabShard(NamedTuple):
    """Hold the place of one rank's classes, in the order of the operators' schema."""

    group: str = ""
    """The name of the process group; "" for one process alone."""
    ranks: int = 1
    first_class: int = 0
    num_classes: int = 0
    """V, the classes of all ranks together; 0 for a head that is not sharded."""
    tokens_sharded: bool = False
    """True if each rank has tokens of its own, whose losses count together."""
    segments: int = 0
    """The number of segments of the classes, whose statistics are merged in order; 0 for none."""

    @property
    def segment_classes(self) -> int:
        """Return the classes per segment; the last segments may be smaller or empty."""
        return -(-self.num_classes // self.segments)

    @property
    def parts(self) -> int:
        """Return how many parts the statistics of a row are merged from."""
        return self.segments or self.ranks

    def parts_of(self, classes: int) -> list[slice]:
        """Return the slices of a rank's own classes whose statistics are computed separately."""
        if not self.segments:
            return [slice(0, classes)]
        size = self.segment_classes
        return [slice(start, min(start + size, classes)) for start in range(0, classes, size)]


class Arguments(NamedTuple):
    """Hold a call's options as the caller gave them, without inputs, head and target."""

    logit_scale: float | Tensor | None = None
    softcap: float | None = None
    weight: Tensor | None = None  # class weights [V]
    reduction: str = "mean"
    ignore_index: int | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    row_weight: Tensor | None = None  # [...]; of a K-dimensional loss [N, d1, ..., dK]
    normalizer: float | Tensor | None = None
    workspace: int | None = None
    backend: str = "auto"
    shard: VocabShard | None = None
    """The place of this rank's classes; None for a head that is not sharded."""


class Head(NamedTuple):
    """Hold the tensors of a head; in a K-dimensional loss weight and bias have P positions."""

    inputs: tuple[Tensor, ...]  # each [..., D_k]
    weights: tuple[Tensor, ...]  # each [V, D_k]; of a K-dimensional loss one [V, P, D]
    bias: Tensor | None = None  # [V]; [V, P]
    scale: Tensor | None = None  # 0-d

    @property
    def leading(self) -> torch.Size:
        return self.inputs[0].shape[:-1]

    @property
    def tokens(self) -> int:
        return math.prod(self.leading)

    @property
    def classes(self) -> int:
        return self.weights[0].shape[0]

    @property
    def by_position(self) -> bool:
        """Return True for the head of a K-dimensional loss with its own dimension of positions."""
        return self.weights[0].dim() == 3

    @property
    def device(self) -> torch.device:
        return self.inputs[0].device

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return all tensors, in the order of the fields."""
        return (*self.inputs, *self.weights, self.bias, self.scale)

    @property
    def first_position(self) -> "Head":
        """Return the head of the first position; the others have the same layout."""
        bias = None if self.bias is None else self.bias.select(1, 0)
        return Head(self.inputs, (self.weights[0].select(1, 0),), bias, self.scale)

    def at_positions(self) -> list["Head"]:
        """Return the head of each position.

        Each tensor is unbound once, so that autograd stacks its gradient once.
        """
        weights = self.weights[0].unbind(1)
        biases: Any = (None,) * len(weights) if self.bias is None else self.bias.unbind(1)
        return [Head(self.inputs, (weight,), bias, self.scale) for weight, bias in zip(weights, biases)]

    def of(self, tensors: Sequence[Any]) -> "Head":
        """Return a head of these tensors, in the order of the fields."""
        terms = len(self.inputs)
        return Head(tuple(tensors[:terms]), tuple(tensors[terms : 2 * terms]), *tensors[2 * terms :])


class Labels(NamedTuple):
    """Hold target, weights and normalizer of a loss, in the order of the operators' schema."""

    target: Tensor  # [...] or probabilities [..., V]; K-dimensional [N, P] or [N, V, P]
    class_weight: Tensor | None = None  # [V]
    row_weight: Tensor | None = None  # [...]; of a K-dimensional loss [N, P]
    normalizer: Tensor | None = None  # 0-d

    @classmethod
    def of(cls, target: Tensor, arguments: "Arguments | Tensors", input: Tensor) -> "Labels":
        normalizer = normalizer_of(arguments.normalizer, input)
        return cls(target, arguments.weight, arguments.row_weight, normalizer)

    @property
    def given(self) -> tuple[Tensor, ...]:
        return tuple(each for each in self if each is not None)

    def at_positions(self) -> list["Labels"]:
        """Return the labels of each position."""
        positions = zip(*(each.unbind(-1) for each in tensors_by_row(self).values()))
        return [with_rows(self, rows) for rows in positions]


class Tensors(NamedTuple):
    """Hold the tensors of a call, a head with one term, by the names of the public arguments.

    The logit scale may be a number. A call with a number as its normalizer, which changes with each
    step, goes by the operators.
    """

    input: Tensor
    linear_weight: Tensor
    target: Tensor
    linear_bias: Tensor | None = None
    logit_scale: Any = None
    weight: Tensor | None = None
    row_weight: Tensor | None = None
    normalizer: Any = None

    @property
    def head(self) -> Head:
        scale = scale_of(self.logit_scale, self.input)
        return Head((self.input,), (self.linear_weight,), self.linear_bias, scale)

    @property
    def scale_number(self) -> float | None:
        """Return the logit scale if it is a number."""
        return self.logit_scale if type(self.logit_scale) in (int, float) else None

    @property
    def labels(self) -> Labels:
        return Labels.of(self.target, self, self.input)


ROW_FACTORS = ("row_weight",)
"""The fields of Arguments and Labels that multiply each row's loss."""
BY_ROW = ("target", *ROW_FACTORS)
"""The fields of Labels that have an entry for each row."""


# Functions, since Dynamo of torch 2.11 traces neither a property of Labels nor Labels._replace.


def tensors_by_row(labels: Labels) -> dict[str, Tensor]:
    """Return the tensors that have an entry for each row, by name."""
    rows = {}
    for name in BY_ROW:
        tensor = getattr(labels, name)
        if tensor is not None:
            rows[name] = tensor
    return rows


def with_rows(labels: Labels, rows: Iterable[Tensor]) -> Labels:
    """Return the labels with other tensors in place of those that `tensors_by_row` returns."""
    each = iter(rows)
    target, row_weight = next(each), None if labels.row_weight is None else next(each)
    return Labels(target, labels.class_weight, row_weight, labels.normalizer)


class Options(NamedTuple):
    """Hold the arguments of a call that are not tensors, in the order of the operators' schema."""

    reduction: str = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float = 0.0
    """The soft cap; 0 for none."""
    few_tokens: bool = False
    """True if one chunk of all tokens may form dW by a single GEMM (planner.few_tokens).

    The operator's caller sets it: inside a graph the number of tokens may be symbolic, and no
    decision should depend on a symbol.
    """
    engine: str = ""
    """The engine that runs the call, one of ENGINES in planning/call.py; "" until it is chosen.

    The operator's caller chooses it once (planner.with_graph_facts), for forward and backward.
    """
    dense: int | None = None
    """The bytes of the dense computation (call_memory.py), which limit the default workspace.

    The operator's caller sets it, because it depends on the number of tokens. It is None before
    that, and in a graph.
    """
    compute_dtype: torch.dtype = torch.float32
    """The dtype of the products' operands: the input's, or autocast's; see also OperandAccess."""
    workspace: int | None = None
    backend: str = "auto"
    # The fields of VocabShard.
    group: str = ""
    ranks: int = 1
    first_class: int = 0
    num_classes: int = 0
    tokens_sharded: bool = False
    segments: int = 0

    @classmethod
    def of(cls, input: Tensor, arguments: Arguments) -> "Options":
        """Make options of checked arguments: as plain numbers, with defaults in place of None."""
        ignore_index, shard = arguments.ignore_index, arguments.shard
        smoothing = float(arguments.label_smoothing)
        return cls(
            reduction=arguments.reduction,
            ignore_index=-100 if ignore_index is None else operator.index(ignore_index),
            label_smoothing=smoothing if smoothing > 0 else 0.0,  # a number below 0, or NaN, counts as 0
            z_loss=float(arguments.z_loss),
            softcap=float(arguments.softcap or 0),
            compute_dtype=compute_dtype(input),
            workspace=capped(arguments.workspace),
            backend=arguments.backend,
            **({} if shard is None else shard._asdict()),
        )

    @property
    def shard(self) -> VocabShard:
        """Return the place of this rank's classes."""
        return VocabShard(
            self.group, self.ranks, self.first_class, self.num_classes, self.tokens_sharded, self.segments
        )

    @property
    def sharded(self) -> bool:
        return self.num_classes > 0

    @property
    def sum_dtype(self) -> torch.dtype:
        """Return the dtype of logits, statistics and accumulators."""
        return torch.promote_types(self.compute_dtype, torch.float32)


def scale_of(logit_scale: float | Tensor | None, input: Tensor) -> Tensor | None:
    """Return the logit scale as a tensor, or None if there is none or it is the number 1.

    A number becomes a 0-d tensor in the dtype of the sums; a tensor is returned as it is.
    """
    if logit_scale is None or isinstance(logit_scale, Tensor):
        return logit_scale
    return None if logit_scale == 1 else number_beside(input, logit_scale)


def normalizer_of(normalizer: float | Tensor | None, input: Tensor) -> Tensor | None:
    """Return the normalizer as a tensor on the input's device, in the dtype of the sums."""
    return None if normalizer is None else number_beside(input, normalizer)


def number_beside(tensor: Tensor, number: float | Tensor) -> Tensor:
    """Return a number as a 0-d tensor on the tensor's device, in the dtype of its sums.

    Every divisor of a sum comes from here, so that the last bits do not depend on its kind. On CUDA
    torch multiplies by the reciprocal of a divisor that is a number or lies in the CPU's memory.
    """
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    if isinstance(number, Tensor):
        number = number.to(dtype)  # A product of two 0-d tensors would have the wider dtype.
        if number.device == tensor.device:
            return number
    # A product with a number, or a 0-d tensor in the CPU's memory, does not wait for the device.
    # torch.full is not used, because torch.compile would compile a graph for every value.
    return torch.ones((), dtype=dtype, device=tensor.device) * number


def normalized(total: Tensor, normalizer: float | Tensor) -> Tensor:
    """Return total / normalizer; if the normalizer is 0, return NaN with a gradient of 0."""
    count = normalizer_of(normalizer, total)
    assert count is not None
    nothing = count == 0
    mean = total / count.to(total.dtype).masked_fill(nothing, torch.inf)
    return mean + torch.where(nothing, torch.nan, 0.0).to(total.dtype)


def capped(workspace: int | None) -> int | None:
    """Limit the bytes to the 64 bits of the operators' schema."""
    return None if workspace is None else min(operator.index(workspace), 1 << 60)


def compute_dtype(input: Tensor) -> torch.dtype:
    device = input.device.type
    if device != "meta" and torch.is_autocast_enabled(device) and input.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return input.dtype
