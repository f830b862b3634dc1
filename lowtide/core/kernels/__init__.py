"""Tell what a device can run, and launch Triton kernels.

Modules, in import order (a module imports only from those above it):

backend         capabilities of the device: instructions, Triton and its interpreter, Gluon, macOS
devices         devices beside the CPU and CUDA, where calls run plain torch
handle          the C function that launches a compiled kernel, and maps of descriptors
launch          Triton kernels that remember what their launches need
triton_helpers  Triton functions and a kernel that several operators use
"""
