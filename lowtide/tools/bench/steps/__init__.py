"""Measure whole steps of fine-tuning public models.

Modules, in the order of imports:

* cases: the models, by the fields of their configurations.
* rows: every provider on one model, in turns, and their rows as a table and as a CSV.
"""
