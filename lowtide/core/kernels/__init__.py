"""Hold what every Triton kernel needs of the device and of its launch.

Modules, in import order (a module imports only from those above it):

backend         capabilities of the device: Triton and its interpreter, Gluon pipelines
launch          Triton kernels that remember what their launches need
triton_helpers  Triton functions and a kernel that several operators use
"""
