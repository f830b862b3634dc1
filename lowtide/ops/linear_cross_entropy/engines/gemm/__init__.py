"""Hold what all GEMM kernels of the engines share; each kernel adds an epilogue of its own.

Modules; only counted_rows_triton imports another, counted_rows:

triton               order of tiles, their halves, tensor descriptors; Gluon kernels use them too
gluon                pipelined GEMMs on Hopper in Gluon: one producer warp, two consumer warpgroups
counted_rows         an order of rows in which ignored ones come last
counted_rows_triton  the kernel that makes it, and what others read of it
"""
