"""Hold the operators, each of which computes a large intermediate in pieces.

chunked_loss and distillation use parts of linear_cross_entropy. Apart from that, a folder imports
only lowtide.core.

Folders, in import order:

linear_cross_entropy  a linear head with cross-entropy or log-probabilities
attention             exact attention without the matrix of scores
chunked_loss          any loss of a head's output, computed chunk by chunk
distillation          divergences between the outputs of two heads
"""
