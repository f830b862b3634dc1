"""Compute the loss and its gradients from float32 logits; this engine can run every call.

Modules, in import order (a module imports only from those above it):

spec            which calls the engine runs, and how many bytes it holds
softmax_torch   row statistics and gradient of a tile of logits, in torch
softmax_triton  the same as one Triton kernel
engine          the engine: "logits_torch", "logits_triton", "cpu_logits"
one_product     the loss of few tokens and its gradients, with dW by a single GEMM
"""
