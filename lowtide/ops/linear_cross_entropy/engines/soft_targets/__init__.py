"""Compute the loss and its gradients for class probabilities on a Hopper GPU, in half the memory.

Between GEMM and softmax, a 16-bit distance from a maximum takes the place of each 32-bit logit;
engine.py has the formulas.

Modules, in import order (a module imports only from those above it):

spec            which calls the engine runs, and how many bytes it holds
gemm_triton     the GEMM whose epilogue stores distances and partial sums, in Triton
gemm_gluon      the same GEMM as a pipeline in Gluon
softmax_triton  row statistics and gradient, from the partial sums and the distances
engine          the engine: LossEngine with these kernels
"""
