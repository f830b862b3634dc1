"""Hold the operators, each of which computes a large intermediate in pieces.

Each folder imports only lowtide.core, except that chunked_loss and distillation also use
linear_cross_entropy.

Folders, in import order:

linear_cross_entropy  a linear head with cross-entropy or log-probabilities
attention             memory-efficient attention
chunked_loss          any loss of a head's output, chunk by chunk
distillation          divergences between the outputs of two heads
"""
