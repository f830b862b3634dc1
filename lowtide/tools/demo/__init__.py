"""Train a small GPT with eager logits, with lowtide's loss, or on several ranks.

It serves `lowtide train`, and the other tools as a model that is always there.

Modules, in the order of imports:

* config: every choice of a training run, in one object.
* data: text to tokens, and batches of them.
* model: the GPT, and sampling from it.
* trainer: steps, their time and memory, and checkpoints.
* parallel: the same on several ranks, which share tokens or classes.
* loop: a run from text to sample.
* compare: the runs that are compared: both losses, or several ranks and one process.
* report: a table and a figure of runs.
"""
