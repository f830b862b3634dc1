"""Measure the divergences of a student's and a teacher's head, of one shape.

Modules, in the order of imports:

* providers: the divergences, the teacher, and the implementations.
* rows: the divergence and its gradients by the definition, and every provider on one divergence.
"""
