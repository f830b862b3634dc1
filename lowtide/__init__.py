"""lowtide keeps the high-water mark of training memory low."""

from lowtide import distillation, losses
from lowtide.chunked_loss import chunked_loss
from lowtide.linear_cross_entropy import (
    LinearCrossEntropyLoss,
    LogProbs,
    linear_cross_entropy,
    linear_log_probs,
)

__all__ = [
    "LinearCrossEntropyLoss",
    "LogProbs",
    "chunked_loss",
    "distillation",
    "linear_cross_entropy",
    "linear_log_probs",
    "losses",
]
__version__ = "0.1.0"
