"""Compute attention in Triton kernels, for CUDA and for Triton's interpreter.

Backward either recomputes the scores in each of its kernels, or computes them once and stores their
gradients, with many features the weights too, one strip at a time (strips.py). Many small problems
have their own kernels, and so have many short ones. A problem is one head of one batch. It is small
if one tile holds all its scores, and short if it has at most 1,024 queries and at most 1,024 keys.

The modules, in the order of imports (a module imports only those above it):

    tile_sizes.py             tile sizes of each kernel, by card, dtype and features
    kernels/                  the kernels and the functions that they share
    strips.py                 what backward stores of scores, and for how many at a time
    launch.py                 the arguments that the kernels of one call share
    launch_small_problems.py  launches for many small problems, and for the bias of short ones
    launch_few_queries.py     launches of forward for a few queries with many keys
    launch_forward.py         the launch of forward
    parts_of_queries.py       the division of queries where there are few tiles of keys
    launch_stored_scores.py   launches that store a strip's gradients of scores, or read them
    launch_recomputed.py      launches of backward that compute scores again
    launch_backward.py        the ways that backward takes, and which launches each is made of
"""
