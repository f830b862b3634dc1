"""lowtide keeps the high-water mark of training memory low."""

from lowtide.linear_cross_entropy import (
    LinearCrossEntropyLoss,
    LogProbs,
    linear_cross_entropy,
    linear_log_probs,
)

__all__ = ["LinearCrossEntropyLoss", "LogProbs", "linear_cross_entropy", "linear_log_probs"]
__version__ = "0.1.0"
