"""Say what a call computes from a head, and name the engines that can run it.

Shapes: N tokens, D features (of the first linear term), V classes.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lowtide.core.kernels.devices import counted_as
from lowtide.ops.linear_cross_entropy.definition.head import Head, Options

# The names of the engines. Three are logits/engine.py: "logits_torch" and "cpu_logits", which uses
# the bfloat16 units of a CPU, with softmax_torch.py, and "logits_triton" with softmax_triton.py.
# The rest are engine.py in the folder of that name. Append new engines at the end: the shape of
# saved statistics tells an engine's place here (saved_stats.py), and caches of compiled graphs keep
# these shapes.
ENGINES = ("logits_torch", "logits_triton", "exponentials", "soft_targets", "cpu_exponentials", "cpu_logits")
# Engines that multiply bfloat16 operands by the units of a CPU (core/bfloat16_units).
CPU_UNITS = ("cpu_exponentials", "cpu_logits")
# Engines whose row statistics leave the target out of a row's sum of exponentials.
EXCLUDING = ("exponentials", "cpu_exponentials")


def backend_of(engine: str) -> str:
    """Return "triton" if the engine's kernels are Triton's, else "torch"."""
    return "torch" if engine in ("logits_torch", *CPU_UNITS) else "triton"


class NeedsGrad(NamedTuple):
    """Say which gradients are wanted, in the order of Head's tensors."""

    inputs: tuple[bool, ...]
    weights: tuple[bool, ...]
    bias: bool
    scale: bool

    @property
    def all(self) -> tuple[bool, ...]:
        return (*self.inputs, *self.weights, self.bias, self.scale)

    @property
    def some(self) -> bool:
        return any(self.all)


class CallKind(NamedTuple):
    """Say what a call computes from a head: which gradients, which outputs, from which target."""

    needs_grad: NeedsGrad
    log_probs: bool
    """True for log-probabilities and entropies, or their gradients; False for a loss."""
    soft_dtype: torch.dtype | None
    """Dtype of the class probabilities, if the target holds them; else None."""
    class_weights: bool
    """True if the call has class weights."""

    @property
    def probabilities(self) -> bool:
        return self.soft_dtype is not None


class Call(NamedTuple):
    """Hold the arguments that a plan depends on: head, options and kind of call."""

    head: Head
    options: Options
    call_kind: CallKind
    rank_tokens: int | None = None
    """The number of tokens per rank for which sizes are chosen; None for this rank's own number."""

    @property
    def N(self) -> int:
        """Return the number of tokens: of all ranks together, if each rank has its own tokens."""
        tokens = self.head.tokens if self.rank_tokens is None else self.rank_tokens
        return tokens * (self.options.ranks if self.options.tokens_sharded else 1)

    @property
    def D(self) -> int:
        return self.head.inputs[0].shape[-1]

    @property
    def V(self) -> int:
        """Return the number of classes for which sizes are chosen.

        For a sharded head this is at least num_classes / ranks, so that ranks that divide the
        classes evenly choose the same sizes. With segments it is num_classes, so that chunks do not
        depend on the number of ranks.
        """
        options = self.options
        if not options.sharded:
            return self.head.classes
        if options.segments:
            return options.num_classes
        return max(self.head.classes, -(-options.num_classes // options.ranks))

    @property
    def features(self) -> list[int]:
        """Return the number of features of each linear term."""
        return [input.shape[-1] for input in self.head.inputs]

    @property
    def device(self) -> str:
        """Return "cuda" or "cpu": the device type whose tile sizes and limits the plan uses."""
        return counted_as(self.head.device.type)

    @property
    def needs_grad(self) -> NeedsGrad:
        return self.call_kind.needs_grad

    @property
    def trained(self) -> list[Tensor]:
        """Return the tensors of the head that get a gradient."""
        pairs = zip(self.head.tensors, self.needs_grad.all)
        return [each for each, grad in pairs if grad and each is not None]

    @property
    def sum_size(self) -> int:
        """Return the bytes of one logit, row statistic or element of an accumulator."""
        return self.options.sum_dtype.itemsize
