"""Compute a linear head and its cross-entropy, or log-probabilities, in bounded memory.

Forward and backward compute the logits of a chunk of rows at a time, and reduce them before the
next chunk.

Folders and modules, in import order (each imports only from those above it):

definition/  what a call computes, its arguments, the dense reference
ranks/       what the ranks of a divided head tell each other before a call
planning/    what follows from shapes and dtypes: requirements, chunk sizes, memory
engines/     the loss and its gradients, chunk by chunk
operator/    the operators of torch.ops.lowtide, and their derivatives
dispatch     run a checked call as an operator, as a row function or densely
positions    a K-dimensional loss, which has one head per position
sharding     a head whose classes are divided over ranks: its DTensors or group, and its results
token_count  the number of tokens that count on all ranks, by which a mean over them divides
data_sharded a head whose classes are divided over ranks that have tokens of their own
api          linear_cross_entropy
log_probs    linear_log_probs
module       LinearCrossEntropyLoss
"""

from lowtide.ops.linear_cross_entropy.api import linear_cross_entropy
from lowtide.ops.linear_cross_entropy.dispatch import LogProbs
from lowtide.ops.linear_cross_entropy.log_probs import linear_log_probs
from lowtide.ops.linear_cross_entropy.module import LinearCrossEntropyLoss

__all__ = ["LinearCrossEntropyLoss", "LogProbs", "linear_cross_entropy", "linear_log_probs"]
