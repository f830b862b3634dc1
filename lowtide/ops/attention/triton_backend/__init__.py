"""Compute attention in Triton kernels, for CUDA and for Triton's interpreter.

Backward either computes each score twice or stores the gradients of scores, strip by strip.

The modules, in the order of imports (a module imports only those above it):

    tile_sizes.py       tile sizes of each kernel, by card, dtype and features
    bf16_split.py       float32 as a sum of bfloat16 pieces
    dropout.py          dropout's keys in one launch
    tiles.py            what the kernels share: loads, products, scores, masks
    forward.py          the forward kernel
    recompute.py        backward kernels that compute the scores again
    confident_rows.py   a row's delta from scores, in float32
    stored_scores.py    backward kernels that read stored gradients of scores
    strips.py           which scores backward stores, and how many at a time
    launch.py           one call as its kernels read it
    launch_forward.py   the launch of forward
    launch_backward.py  launches of backward
"""
