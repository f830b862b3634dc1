"""Compile the Triton kernels of a first call side by side, in threads.

A first call needs up to 20 kernels. Each is compiled as it is launched, one after another, and that
takes longer than all else in a first step (decision 0063).

Modules, in import order (a module imports only from those above it):

notes         note the steps of a rehearsal, in place of taking them
placeholders  tensors without memory, and what torch's operations on them return
launchers     load Triton's C functions that launch kernels, in several threads
launches      launch a kernel; rehearse a call, and compile in threads what it will launch
"""
