from lowtide.ops.linear_cross_entropy.api import (
    LinearCrossEntropyLoss,
    LogProbs,
    linear_cross_entropy,
    linear_log_probs,
)

__all__ = ["LinearCrossEntropyLoss", "LogProbs", "linear_cross_entropy", "linear_log_probs"]
