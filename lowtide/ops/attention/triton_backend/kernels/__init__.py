"""Hold the Triton kernels of attention, and the functions that they share.

The modules, in the order of imports (a module imports only those above it):

    bf16_split.py       float32 as a sum of bfloat16 pieces
    dropout.py          dropout's keys in one launch
    tiles.py            what the kernels share: loads, products, scores, dropout's mask
    visible.py          which tiles of keys or queries a program reads
    forward.py          the forward kernel
    few_queries.py      forward kernels for a few queries with many keys
    recompute.py        backward kernels that recompute the scores
    confident_rows.py   delta in float32, from recomputed scores, for confident rows
    stored_scores.py    backward kernels that store gradients of scores, or read them
    small_problems.py   kernels for many problems whose scores are one tile each
    whole_problems.py   the backward kernel for many short problems, each in one program
    short_bias.py       the gradient of the bias of short problems
"""
