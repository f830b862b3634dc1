"""Record the operations on logits that do not exist, and provide the proxy in their place.

Modules, in import order (a module imports only from those above it):

* reporting: counts of fused losses and materialised logits, in compiled code too; warnings.
* proxy: the base class of both proxies, which receives torch functions, methods and operators.
* functions: the autograd.Functions in whose forward the code runs.
* head_call: what all logits of one call of the head share.
* handlers: the functions that run in place of torch's, by name.
* steps: the steps of optimizers, counted as changes in place of what logits are made of.
* sharded: heads that are divided by classes over ranks.
* expression: the recorded operations, a tree that can be evaluated on any of its rows.
* searched: deferred logits as a dataclass, which torch.distributed searches for tensors.
* logits: `DeferredLogits`, the proxy for logits.
"""
