"""Compute a model's losses by its own code, but without its logits: see `defer_logits`.

The model's head returns an object that records the operations on the logits, and a loss of that
object runs the fused operator.

Modules, in the order of imports (each imports only from those above it):

* recorded/: the recorded operations, and `DeferredLogits`, the proxy for logits.
* elementwise: operations that are recorded number by number.
* indexing: operations that select, reshape or permute rows and classes.
* match_head: the head that the fused operators take, if an expression is one.
* chunks: functions of the rows, chunk by chunk, where the fused operators do not apply.
* reductions: losses and other functions of the rows, by the fused operators or by chunks.
* pytree: deferred logits as a node of torch's pytrees.
* einops_backend: deferred logits as tensors of einops.
* hidden: the proxy for the hidden states, given to the head's own forward.
* locate_head: find the head of a model, and check that it can be deferred.
* api: `defer_logits` and `Deferral`.
"""

from lowtide.deferred.api import Deferral, defer_logits
from lowtide.deferred.recorded.reporting import HeadNotCalledWarning, RealLogitsWarning

__all__ = ["Deferral", "HeadNotCalledWarning", "RealLogitsWarning", "defer_logits"]
