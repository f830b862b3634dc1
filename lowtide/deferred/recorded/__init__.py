"""Record the operations on logits that do not exist, and stand for them.

Modules, in import order (a module imports only from those above it):

* reporting: counts of fused losses and materialised logits, in compiled code too; warnings.
* proxy: torch functions, methods and operators on what stands for a tensor.
* sharded: heads that are divided by classes over ranks.
* expression: the recorded operations, a tree that can be evaluated on any of its rows.
* logits: `DeferredLogits`, the proxy for logits.
"""
