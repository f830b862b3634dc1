"""Compute the loss and its gradients from float32 logits: the engine that runs every call.

Modules, in import order (a module imports only from those above it):

spec            when it runs, and what it holds
softmax_torch   row statistics and gradient of a tile of logits, in torch
softmax_triton  the same as one Triton kernel
engine          the engine: "logits_torch" and "logits_triton"
one_product     few tokens: all gradients by one GEMM each
"""
