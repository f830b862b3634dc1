"""Register attention's operators with torch, and differentiate them.

Each operator runs the backend that was chosen before the call, forward and backward.

The modules, in the order of imports (a module imports only those above it):

    higher_order.py  derivatives of any order, forward mode and vmap
    ops.py           the two registered operators, run by the backend that their options name
    autograd.py      the derivative of these operators
    recorded_call.py calls of the Triton kernels that repeat the launches of an earlier call
"""
