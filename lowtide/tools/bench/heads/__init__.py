"""Measure the loss on the heads of public models, from GPT-2 to Kimi K2.

Modules, in the order of imports:

* data: the heads: features, classes, soft cap, and where these numbers are from.
* rows: every provider on one head and number of tokens, and the way that `doctor` names.
* table: rows as one table, as a CSV and as a picture.
"""
