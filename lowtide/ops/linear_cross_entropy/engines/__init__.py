"""Compute the loss and its gradients from chunks of rows, in bounded memory.

The base engine in engine.py runs the "torch" and "triton" engines. Those in exponentials/ and
soft_targets/ derive from it. planning/requirements.py chooses one per call.

Modules, in import order (a module imports only from those above it):

logits/           the formulas; row statistics and gradient of a tile of logits
row_loss          the loss of each row, and the coefficients of its gradient
gradients         memory for the gradients, and the factors still to be applied to them
gemm/             what the GEMM kernels share, in Triton and in Gluon
weight_gradient/  accumulators of the weight gradient
engine            the base engine: the walk over chunks of rows and blocks of classes
exponentials/     the engine that never stores logits, on CUDA and on the CPU
soft_targets/     the engine for class probabilities on a Hopper GPU
"""
