"""Decide which engines can run a call, in what chunks, and in how much memory.

A decision depends on shapes, dtypes, strides, options and the device. Nothing here reads the values
of tensors, speaks to other ranks or launches a kernel.

Modules, in import order (a module imports only from those above it):

tiling           the sizes of chunks and blocks, and the ways to form the weight gradient
byte_counts      the bytes that each part of a call takes
weight_gradient  how the weight gradient is formed
call             what a call computes from a head; the names of the engines
operands         how an engine reads its operands
plan             the plan of a call: every decision about it
remembered       remember decisions about a call, and use them again for calls that are alike
requirements     the requirements on device and layouts that several engines share
call_memory      the bytes of the dense computation, and those that a K-dimensional loss adds
memory_model     count the bytes that engines have in common
engine_spec      what planning asks each engine; engines/*/spec.py answers
division/        divide a workspace among rows, classes and the accumulator, by predicted time
"""
