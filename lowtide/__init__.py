"""lowtide keeps the high-water mark of training memory low."""

from lowtide.linear_cross_entropy import LinearCrossEntropyLoss, linear_cross_entropy

__all__ = ["LinearCrossEntropyLoss", "linear_cross_entropy"]
__version__ = "0.1.0"
