"""Accumulate the weight gradient over chunks: in float32, packed, or in a single GEMM.

Modules, in import order (a module imports only from those above it):

in_torch       accumulators by torch's operations: sums in float32, and a single GEMM
packed_triton  sums packed into 24 or 20 bits, and the GEMM that adds to them, in Triton
packed_gluon   the same GEMM pipelined in Gluon, on Hopper
row_kernels    kernels that handle one row per program: target logits, scaled rows, dX
target_rows    kernels that add the target rows to dW, and round a block of its classes
accumulators   the accumulators of the exponentials and soft-targets engines on CUDA
choose         the protocol of all accumulators, WeightAccumulator, and the choice of one
"""
