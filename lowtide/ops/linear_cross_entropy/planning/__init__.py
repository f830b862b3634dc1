"""Decide by shapes, dtypes and device which engine can run a call, and in what sizes and memory.

Nothing here reads the values of tensors, speaks to other ranks or launches a kernel.

Modules, in import order (a module imports only from those above it):

tiling           the sizes of chunks and blocks, and the ways to form the weight gradient
byte_counts      the bytes that each part of a call takes
weight_gradient  how the weight gradient is formed
call             what a call computes from a head; the names of the engines
plan             the plan of a call: every decision about it
operands         how an engine reads its operands
remembered       what was decided for a call, for calls that are alike
requirements     what device and layouts allow, for several engines
call_memory      bytes of a whole call: the dense computation, a K-dimensional loss
memory_model     count the bytes that engines have in common
engine_spec      what planning asks each engine; engines/*/spec.py answers
division/        divide a workspace among rows, classes and the accumulator, by predicted time
"""
