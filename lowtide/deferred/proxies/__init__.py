"""Provide the proxies that stand for hidden states and logits in the model's own code.

Modules, in import order (a module imports only from those above it):

* counts: counts of fused losses and of materialised logits, in compiled code too; their warning.
* proxy: the base class of both proxies, which receives torch functions, methods and operators.
* autograd_functions: the autograd.Functions in whose forward the code runs.
* head_call: what all logits of one call of the head share.
* materialize: real logits of recorded ones.
* storage: what logits share that would be views of the same memory; changes in place.
* handlers: the functions that run in place of torch's, by name.
* attributes: what deferred logits answer as the tensor would, beside torch's functions.
* searched: deferred logits as a dataclass, which torch.distributed searches for tensors.
* logits: `DeferredLogits`, the proxy for logits.
* hidden: the proxy for the hidden states, given to the head's own forward.
"""
