"""Multiply bfloat16 matrices on a CPU and return float32; torch has no such function.

The kernels are C++ (gemm.cpp) and are compiled on the user's machine at first use.

Modules, in import order (a module imports only from those above it):

private_directory  open a directory that only this user can change
compiled_library   compile a C++ file once per user, and load the library
gemm               the functions that multiply, and a test of whether they are available
"""
