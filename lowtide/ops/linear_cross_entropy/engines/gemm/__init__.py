"""Hold what all GEMM kernels of the engines share; each kernel adds an epilogue of its own.

Modules; neither imports the other:

triton  order of tiles, their halves, tensor descriptors; Gluon kernels use them too
gluon   pipelined GEMMs on Hopper in Gluon: one producer warp, two consumer warpgroups
"""
