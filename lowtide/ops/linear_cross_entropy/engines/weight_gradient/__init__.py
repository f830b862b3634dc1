"""Accumulate the weight gradient over chunks: in float32, packed, or in a single GEMM.

accumulators.py has one class for each form on CUDA; in_place.py has the CPU's. Each class has the
methods add_product, for a chunk's GEMM, and round_in_place, which makes the gradient.

Modules, in import order (a module imports only from those above it):

in_place       an accumulator of which half lies in a half-precision gradient's memory
packed_triton  the packed formats, their kernels and the GEMM that adds to them, in Triton
packed_gluon   the same GEMM pipelined in Gluon, on Hopper
row_kernels    kernels that handle one row per program: target logits, target rows, dX
accumulators   the accumulators of the exponentials and soft-targets engines on CUDA
"""
