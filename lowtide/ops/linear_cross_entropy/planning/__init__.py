"""Decide what follows from shapes, dtypes and the device: requirements, chunk sizes, memory.

Nothing here reads the values of tensors or launches a kernel, apart from `agreement`.

Modules, in import order (a module imports only from those above it):

call             what a call computes from a head; the names of the engines
agreement        the ranks of a sharded head agree on a call, or raise the same error
plan             the plan of a call: the sizes of its pieces, the way to form its weight gradient
operands         how an engine reads its operands
remembered       what was decided for a call, for calls that are alike
requirements     what device and layouts allow, for several engines
call_memory      bytes of a whole call: the dense computation, a K-dimensional loss
byte_counts      the bytes that each part of a call takes
weight_gradient  how the weight gradient is formed
memory_model     count the bytes that engines have in common
engine_spec      what planning asks each engine; engines/*/spec.py answers
division/        divide a workspace among rows, classes and the accumulator, by predicted time
"""
