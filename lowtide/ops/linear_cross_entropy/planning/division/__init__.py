"""Divide a workspace among rows, classes and the accumulator of the weight gradient.

Modules, in import order (a module imports only from those above it):

cost_model    predicted seconds of the GEMMs of a step on an H100 or H200
class_blocks  sizes of chunks and blocks where the weight gradient is formed class by class
step_time     predicted seconds of a step with given sizes
sizes         divide a workspace among chunks of rows, blocks of classes and the accumulator
workspace     the workspace of a call, if none is asked for
"""
