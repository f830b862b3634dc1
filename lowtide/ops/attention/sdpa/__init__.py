"""Run torch's own attention kernels as a backend of the operators.

The kernels misread some tensors. Such tensors are refused or copied.

The modules, in the order of imports (a module imports only those above it):

    alignment.py  which tensors torch's CUDA kernels can read
    kernels.py    forward and backward by torch's kernels
"""
