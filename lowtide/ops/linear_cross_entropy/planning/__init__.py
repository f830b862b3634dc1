"""Decide everything that follows from shapes, dtypes and the device: engine, chunk sizes, memory.

Nothing here reads the values of tensors or launches a kernel.

Modules, in import order (a module imports only from those above it):

requirements  which engine runs a call, and what that engine requires of the operands
call_memory   bytes of a whole call: the dense computation, a K-dimensional loss
cost_model    predicted seconds of the GEMMs of a step on an H100 or H200
class_blocks  sizes of chunks and blocks where the weight gradient is formed class by class
chunking      divide a workspace among chunks of rows, blocks of classes and sums
planner       make the plan of a call
"""
