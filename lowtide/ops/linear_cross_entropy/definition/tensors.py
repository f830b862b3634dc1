"""Define the tensors of a call by the names of the public arguments."""

from typing import Any, NamedTuple

from torch import Tensor

from lowtide.ops.linear_cross_entropy.definition.head import Head, Labels, normalizer_of, scale_of


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
        normalizer = normalizer_of(self.normalizer, self.input)
        return Labels(self.target, self.weight, self.row_weight, normalizer)
