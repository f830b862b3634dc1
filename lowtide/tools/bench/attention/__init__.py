"""Measure attention beside torch's own kernels and the peers.

The providers of a case take turns, forward and backward.

Modules, in the order of imports:

* cases: the shapes, and their tensors.
* providers: the implementations.
* truth: the definition, in a wider dtype.
* rows: every provider on one case, timed in turn.
* table: rows as a table and as a CSV.
"""
