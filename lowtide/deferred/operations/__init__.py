"""Run in place of torch's functions of deferred logits; importing these modules registers them.

Modules, in import order (a module imports only from those above it):

* elementwise: operations that are recorded number by number.
* indexing: operations that select, reshape or permute rows and classes.
* reductions: losses and other functions of the rows, by the fused operators or by chunks.
"""
