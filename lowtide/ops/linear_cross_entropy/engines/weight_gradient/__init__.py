"""Accumulate the weight gradient over chunks: in float32, packed, or in a single GEMM.

Modules, in import order (a module imports only from those above it):

in_torch       sums in float32, by torch; one of which half lies in a half-precision gradient
packed_triton  the packed formats, their kernels and the GEMM that adds to them, in Triton
packed_gluon   the same GEMM pipelined in Gluon, on Hopper
row_kernels    kernels that handle one row per program: target logits, scaled rows, dX
target_rows    kernels that add the rows of the targets to dW, and round its blocks of classes
accumulators   the accumulators of the exponentials and soft-targets engines on CUDA
choose         the protocol of all accumulators, WeightAccumulator, and the choice of one
"""
