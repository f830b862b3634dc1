"""Implement what the commands of `lowtide` do; their options and help texts are in `cli`.

No operator imports these modules.

Modules, in the order of imports:

* errors: the error that a user can correct.
* ranks: the processes of torchrun, of which the first reads, writes and prints.
* files: files that are either complete or absent; tables and dictionaries from them.
* environment: versions, card and commit, for every table.
* units: a number of bytes in the unit that suits it.
* figures: the common look of figures.
* tables: the common look of tables.
* eager: losses and attention with all logits and scores, which every tool compares with.
* layers: shard or checkpoint a model's layers; group parameters for an optimizer.
* demo: a small GPT and its training, with eager logits, lowtide's loss, or on several ranks.
* estimate: the peak memory of a training step, computed on fake tensors.
* profile: memory over time, recorded from the allocator.
* doctor: what this machine has, and how it computes a call.
* bench: time, memory and error beside torch and the peers.
"""
