"""Compute attention in Triton kernels, for CUDA and for Triton's interpreter.

Backward computes each score twice or stores the gradients of scores, strip by strip; many small or
short problems have kernels of their own.

The modules, in the order of imports (a module imports only those above it):

    tile_sizes.py       tile sizes of each kernel, by card, dtype and features
    kernels/            the kernels, and what they share
    strips.py           which scores backward stores, and how many at a time
    launch.py           one call as its kernels read it
    launch_small_problems.py  launches of many small problems, and for a short bias
    launch_few_queries.py  launches of forward for a few queries of many keys
    launch_forward.py   the launch of forward
    launch_stored_scores.py  launches of backward that store a strip's scores or read them
    launch_backward.py  launches of backward
"""
