"""Train a small GPT, once with eager logits and once with lowtide's loss.

It serves `lowtide train`, and the other tools as a model that is always there.

Modules, in the order of imports:

* config: every choice of a training run, in one object.
* data: text to tokens, and batches of them.
* model: the GPT, and sampling from it.
* trainer: steps, their time and memory, and checkpoints.
* loop: a run from text to sample.
* compare: the same run with both losses, each in its own process.
* report: a table and a figure of runs.
"""
