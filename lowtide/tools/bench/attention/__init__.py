"""Measure attention beside torch's own kernels and the peers.

The providers of a case take turns, forward and backward.

Modules, in the order of imports:

* cases: the shapes, and their tensors.
* torch_kernels: torch's own implementations.
* peers: those of other packages.
* providers: all implementations, and ours.
* truth: the definition, in float64 where that takes seconds at most.
* rows: every provider on one case, timed in turn.
* table: rows as a table and as a CSV.
* real: the shapes of public models.
* real_table: their rows as one table, as a CSV and as a picture.
"""
