"""Compute attention tile by tile in plain torch, on any device and in any dtype.

Products are BLAS calls. Only the scores of one tile exist at a time.

The modules, in the order of imports (a module imports only those above it):

    tiling.py    a tile's size, and its parts of the operands
    forward.py   the tiles that a mask leaves, and the online softmax over them
    backward.py  the gradients, from scores that are computed again
"""
