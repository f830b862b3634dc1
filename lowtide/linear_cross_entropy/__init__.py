from lowtide.linear_cross_entropy.api import LinearCrossEntropyLoss, linear_cross_entropy

__all__ = ["LinearCrossEntropyLoss", "linear_cross_entropy"]
