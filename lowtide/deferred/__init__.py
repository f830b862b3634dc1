"""Compute a model's losses by its own code, but without its logits: see `defer_logits`.

The model's head returns an object that records the operations on the logits, and a loss of that
object runs the fused operator.

Modules, in the order of imports (each imports only from those above it):

* recorded/: the recorded operations, a tree of products and of operations on them.
* proxies/: `DeferredLogits`, the proxy for logits, and that for hidden states.
* operations/: the functions that run in place of torch's.
* pytree: deferred logits as a node of torch's pytrees.
* einops_backend: deferred logits as tensors of einops.
* watch: warn of a model that is trained without calls of its head.
* locate_head: find the head of a model, and check that it can be deferred.
* api: `defer_logits` and `Deferral`.
"""

from lowtide.deferred.api import Deferral, defer_logits
from lowtide.deferred.proxies.counts import RealLogitsWarning
from lowtide.deferred.watch import HeadNotCalledWarning

__all__ = ["Deferral", "HeadNotCalledWarning", "RealLogitsWarning", "defer_logits"]
