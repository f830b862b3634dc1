"""Record the operations on logits that do not exist, as a tree that gives any of their rows.

Modules, in import order (a module imports only from those above it):

* steps: the steps of optimizers, counted as changes in place of what logits are made of.
* sharded: heads that are divided by classes over ranks.
* expression: the recorded operations, a tree that can be evaluated on any of its rows.
* chunks: functions of the rows, chunk by chunk, where the fused operators do not apply.
* match_head: the head that the fused operators take, if an expression is one.
"""
