"""Compute the loss and its gradients for class probabilities on a Hopper GPU, in half the memory.

Between GEMM and softmax, 16-bit distances from a maximum replace 32-bit logits; engine.py has the
formulas.

Modules, in import order (a module imports only from those above it):

spec            when it runs, and what it holds
gemm_triton     the GEMM whose epilogue stores distances and partial sums, in Triton
gemm_gluon      the same GEMM pipelined in Gluon
softmax_triton  row statistics and gradient from the distances
engine          the engine: the base engine with these kernels
"""
