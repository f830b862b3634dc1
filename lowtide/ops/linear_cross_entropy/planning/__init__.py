"""Decide everything that follows from shapes, dtypes and the device: engine, chunk sizes, memory.

Nothing here reads the values of tensors or launches a kernel.

Modules, in import order (a module imports only from those above it):

call             what a call computes from a head; the names of the engines
plan             the plan of a call: the sizes of its pieces, the way to form its weight gradient
operands         how an engine reads its operands
requirements     which engine runs a call, and why no other
call_memory      bytes of a whole call: the dense computation, a K-dimensional loss
byte_counts      the bytes that each part of a call takes
weight_gradient  how the weight gradient is formed
memory_model     count these bytes, with a function for each engine
cost_model       predicted seconds of the GEMMs of a step on an H100 or H200
class_blocks     sizes of chunks and blocks where the weight gradient is formed class by class
sizes            divide a workspace among chunks of rows, blocks of classes and the accumulator
workspace        the workspace of a call, if none is asked for
planner          make the plan of a call
"""
