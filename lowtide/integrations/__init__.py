"""Connect lowtide with other frameworks, through their public hooks.

Each module imports its framework; lowtide itself imports none of them.

Modules, in the order of imports:

* callback: what the three callbacks have in common.
* lightning: a callback for Lightning.
* transformers: a callback for Transformers' Trainer, and an attention implementation.
* trl: a callback for the trainers of TRL.
"""
