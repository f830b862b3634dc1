"""Run in place of torch's functions of deferred logits; importing these modules registers them.

Modules, in import order (a module imports only from those above it):

* elementwise: operations that are recorded number by number.
* indexing: operations that select, reshape or permute rows and classes.
* row_values: functions of the rows that no operator has, a chunk of rows at a time.
* log_probs: log-probabilities, logsumexp and picked logits, by the fused operator.
* reductions: argmax, sums and means over the classes, and entropies by the fused operator.
* loss: the cross-entropy, by the fused operator or a chunk of rows at a time.
* divergence: torch's kl_div, by the operator of distillation or as a cross-entropy.
"""

from lowtide.deferred.operations import (
    divergence,
    elementwise,
    indexing,
    log_probs,
    loss,
    reductions,
    row_values,
)

__all__ = ["divergence", "elementwise", "indexing", "log_probs", "loss", "reductions", "row_values"]
