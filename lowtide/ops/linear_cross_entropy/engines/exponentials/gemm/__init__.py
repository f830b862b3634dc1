"""Multiply a chunk's operands, and store exponentials of the logits in place of the logits.

Modules, in import order (a module imports only from those above it):

gemm_triton  the GEMM kernel whose epilogue stores exponentials and partial sums
gemm_gluon   the same GEMM pipelined in Gluon, for few features
launch       choose and launch one of these two kernels on a chunk's operands
"""
