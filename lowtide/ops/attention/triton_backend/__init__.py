"""Compute attention in Triton kernels, for CUDA and for Triton's interpreter.

Backward computes each score twice or stores the gradients of scores, strip by strip; many small or
short problems have kernels of their own.

The modules, in the order of imports (a module imports only those above it):

    tile_sizes.py       tile sizes of each kernel, by card, dtype and features
    bf16_split.py       float32 as a sum of bfloat16 pieces
    dropout.py          dropout's keys in one launch
    tiles.py            what the kernels share: loads, products, scores, masks
    forward.py          the forward kernel
    recompute.py        backward kernels that compute the scores again
    confident_rows.py   a row's delta from scores, in float32
    stored_scores.py    backward kernels that read stored gradients of scores
    small_problems.py   kernels of many problems whose scores are one tile each
    whole_problems.py   the backward kernel of many short problems, each in one program
    short_bias.py      the gradient of a bias of short problems
    strips.py           which scores backward stores, and how many at a time
    launch.py           one call as its kernels read it
    launch_small_problems.py  launches of many small problems, and for a shared bias
    launch_forward.py   the launch of forward
    launch_backward.py  launches of backward
"""
