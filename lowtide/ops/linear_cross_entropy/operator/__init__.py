"""Register the operators torch.ops.lowtide.linear_*, their derivatives and fake versions.

An operator runs the engine of its plan; a compiled graph contains it as one node.

Modules, in import order (a module imports only from those above it):

planner          the plan of a call: which engine, and how it uses its memory
positions        the gradients of a K-dimensional loss, one position after the other
ops              the operators themselves
fake             shapes and dtypes of their outputs, FLOPs and memory, without running them
higher_order     the chunked definition, for every transform and derivatives of higher order
autograd         the operators' first derivatives
remembered_call  a loss like an earlier one, straight by its engine
"""
