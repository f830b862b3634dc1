"""Hold what the GEMM kernels of the engines share; each kernel adds its own epilogue.

Modules (counted_rows_triton imports counted_rows; there are no other imports among them):

triton               order and halves of tiles, tensor descriptors; Gluon kernels use them too
gluon                pipelined GEMMs on Hopper in Gluon: one producer warp, two consumer warpgroups
counted_rows         an order of rows in which ignored ones come last
counted_rows_triton  the kernel that computes this order, and functions by which kernels read it
"""
